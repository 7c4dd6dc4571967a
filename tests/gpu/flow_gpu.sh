#!/usr/bin/env bash
# The whole flow on a GPU, for a job that knows nothing of gemmtune: capture, sweep, replay, run.
# Run in the repository's root; PYTHON names the interpreter, SECONDS_PER_SHAPE the sweep's pace.
# Arguments: the job's, else a small Hugging Face Llama in bf16. Two minutes or so.
set -e
PYTHON=${PYTHON:-python3}
out=${FLOW_OUT:-$(mktemp -d)}
if [ $# -gt 0 ]; then job=("$@"); else
    cat > "$out/train.py" <<'PY'
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=8, vocab_size=32000,
                     num_attention_heads=16, num_key_value_heads=4, use_cache=False)
model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
data = torch.randint(0, 32000, (4, 2048), device="cuda")
for step in range(int(sys.argv[1])):
    loss = model(input_ids=data, labels=data).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.6f}")
PY
    job=("$PYTHON" "$out/train.py" 2000)
fi
gemmtune() { echo "\$ gemmtune $*"; "$PYTHON" -m gemmtune "$@"; }
gemmtune capture --time --warmup 5 --steps 10 --stop -o "$out/shapes.csv" -- "${job[@]}"
head -8 "$out/shapes.csv" | cut -c1-400
gemmtune sweep "$out/shapes.csv" -o "$out/tuned.csv" --seconds-per-shape "${SECONDS_PER_SHAPE:-3}"
grep -v '^#' "$out/tuned.csv" | cut -c1-220
gemmtune replay "$out/tuned.csv" --budget "${REPLAY:-40s}" -o "$out/replay.json" -- "${job[@]}"
[ -n "$RUN" ] && gemmtune run "$out/tuned.csv" -- $RUN || true
