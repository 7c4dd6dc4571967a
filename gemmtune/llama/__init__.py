"""The reference job: a Llama trained with FSDP, and Transformer Engine if asked for.

`python -m gemmtune.llama --help` tells its options. It knows nothing of the rest of gemmtune (but
for the error tree): it is a job like any other, to be captured, tuned and replayed.
"""
