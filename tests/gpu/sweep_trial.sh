#!/bin/sh
# A trial on a GPU: the tests of the cuBLASLt backend, then a sweep of five GEMMs of Llama-3-8B.
# Run in the repository's root; PYTHON names the interpreter. Prints the sweep's table last.
set -e
PYTHON=${PYTHON:-python3}
out=$(mktemp -d)
"$PYTHON" -m pytest -q -rA -s -p no:cacheprovider tests/gpu || echo "TESTS FAILED"
cat > "$out/shapes.csv" <<'CSV'
m,n,k,trans_a,trans_b,type_a,type_b,type_d,bias_type,lda,ldb,ldd,beta,fast_accum,ws_bytes,align,api
6144,8192,4096,T,N,bfloat16,bfloat16,bfloat16,-,4096,4096,6144,0,0,0,0,lt
28672,8192,4096,T,N,float8e4m3,float8e4m3,bfloat16,-,4096,4096,28672,0,1,33554432,256,lt
4096,8192,28672,T,N,float8e4m3,float8e5m2,bfloat16,-,28672,28672,4096,0,0,33554432,256,lt
4096,14336,8192,N,T,bfloat16,bfloat16,float32,-,4096,14336,4096,1,0,33554432,256,lt
128256,8192,4096,T,N,bfloat16,bfloat16,bfloat16,-,4096,4096,128256,0,0,0,0,lt
CSV
"$PYTHON" -m gemmtune doctor || true
time "$PYTHON" -m gemmtune sweep "$out/shapes.csv" -o "$out/tuned.csv" --backend cublaslt \
    --seconds-per-shape "${SECONDS_PER_SHAPE:-6}"
cut -d, -f1-3 --complement "$out/candidates.csv" | grep -c failed || true
grep -o 'failed,[^,]*' "$out/candidates.csv" | sort | uniq -c | sort -rn | head -20 || true
cat "$out/tuned.csv"
