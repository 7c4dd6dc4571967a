#!/usr/bin/env bash
# A job whose forward and backward are one CUDA graph, on a GPU: replay says that arms cannot take
# turns in it, run applies the rows as it is captured. Run in the repository's root. A minute or two.
set -e
PYTHON=${PYTHON:-python3}
out=$(mktemp -d)
cat > "$out/train.py" <<'PY'
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(4))).cuda().bfloat16()
x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
def work():
    optimizer.zero_grad(set_to_none=False)
    model(x).float().square().mean().backward()
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    for _ in range(3): work()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
if "graph" in sys.argv:
    with torch.cuda.graph(graph): work()
    work = graph.replay
for _ in range(int(sys.argv[1])):
    work()
    optimizer.step()
torch.cuda.synchronize()
print("done")
PY
gemmtune() { echo "\$ gemmtune $*"; "$PYTHON" -m gemmtune "$@" || code=$?; }
gemmtune capture --stop --no-profile -o "$out/shapes.csv" -- "$PYTHON" "$out/train.py" 20
gemmtune sweep "$out/shapes.csv" -o "$out/tuned.csv" --seconds-per-shape 2
code=0
gemmtune replay "$out/tuned.csv" --budget 20s -- "$PYTHON" "$out/train.py" 3000 graph
echo "exit code $code, which must be 2: nothing was compared, CUDA graphs named"
code=0
gemmtune run "$out/tuned.csv" -- "$PYTHON" "$out/train.py" 50 graph
echo "exit code $code, which must be 0: the rows used in the capture"
