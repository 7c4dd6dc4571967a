"""A fake of Transformer Engine for ROCm: GEMMs on a CPU, through a model of its algorithm cache.

Module paths and calls are those of TE 2.11, and of 1.x where the script (FAKE_TE) says `te: 1`.
"""

__version__ = "2.11.0+fake"
