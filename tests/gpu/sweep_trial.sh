#!/usr/bin/env bash
# A trial on a GPU: the tests of the cuBLASLt backend, then a sweep of five GEMMs of Llama-3-8B.
# Run in the repository's root; PYTHON names the interpreter. Prints the sweep's table last.
set -e
PYTHON=${PYTHON:-python3}
out=$(mktemp -d)
"$PYTHON" -m pytest -q -rA -s -p no:cacheprovider tests/gpu || echo "TESTS FAILED"
cat > "$out/shapes.csv" <<'CSV'
m,n,k,trans_a,trans_b,type_a,type_b,type_d,bias_type,lda,ldb,ldd,beta,fast_accum,ws_bytes,align,api
6144,8192,4096,T,N,bfloat16,bfloat16,bfloat16,-,4096,4096,6144,0,0,33554432,256,lt
28672,8192,4096,T,N,float8e4m3,float8e4m3,bfloat16,-,4096,4096,28672,0,1,33554432,256,lt
4096,8192,28672,T,N,float8e4m3,float8e5m2,bfloat16,-,28672,28672,4096,0,0,33554432,256,lt
4096,14336,8192,N,T,bfloat16,bfloat16,float32,-,4096,14336,4096,1,0,33554432,256,lt
128256,8192,4096,T,N,bfloat16,bfloat16,bfloat16,-,4096,4096,128256,0,0,33554432,256,lt
CSV
"$PYTHON" -m gemmtune doctor || true
time "$PYTHON" -m gemmtune sweep "$out/shapes.csv" -o "$out/tuned.csv" --backend cublaslt \
    --seconds-per-shape "${SECONDS_PER_SHAPE:-6}"
"$PYTHON" - "$out" <<'PY'
import collections, json, sys
from gemmtune import table
rows = table.read(f"{sys.argv[1]}/candidates.csv", table.Candidate).rows
reasons = collections.Counter(r.reason.split(":")[0][:60] for r in rows if r.status == "failed")
print("failed:", dict(reasons) or "none")
for gemm in dict.fromkeys(r.gemm for r in rows):
    own = [r for r in rows if r.gemm == gemm]
    best = sorted((r for r in own if r.status in ("winner", "finalist")), key=lambda r: -r.ratio)
    print(f"{gemm}: {len(own)} tried")
    for r in [*[r for r in own if r.status == "default"], *best]:
        print(f"  {r.status:8} {r.time_us:8.1f} us {r.ratio:.4f} rank {r.algo.aidx:4} {r.algo.config}")
readings = [e["gpu"] for e in map(json.loads, open(f"{sys.argv[1]}/candidates.samples.jsonl")) if "gpu" in e]
for name in ("sm_mhz", "power_w", "temperature_c"):
    print(name, sorted(r[name] for r in readings)[:: max(1, len(readings) // 6)])
print("throttled:", collections.Counter(t for r in readings for t in r["throttled"]), len(readings))
PY
