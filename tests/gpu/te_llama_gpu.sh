#!/usr/bin/env bash
# Every GEMM of `gemmtune.llama --te` on a GPU, by three witnesses that must agree: TE's own entry
# points (the hook), the library's calls (the interposer), and what the TE worker of the sweep issues.
#   tests/gpu/te_llama_gpu.sh FOLDER    writes FOLDER/*.csv; the summary comes last
set -uo pipefail
cd "$(dirname "$0")/../.."
folder=$1
mkdir -p "$folder"
common=(--te --model llama3-8b --layers 2 --batch 2 --seq 4096 --steps 20)
failed=0
tables=()

capture() { # NAME, then the job's own options
  local table=$folder/$1.csv
  shift
  echo "== python3 -m gemmtune.llama ${common[*]} $*"
  python3 -m gemmtune capture --stop --no-profile -o "$table" -- \
    python3 -m gemmtune.llama "${common[@]}" "$@" > "$folder/said.txt" 2>&1 || failed=1
  grep -E "Transformer Engine|error|rror:" "$folder/said.txt" || { cat "$folder/said.txt"; failed=1; }
  grep -q "library for the same ones$" "$folder/said.txt" || failed=1
  tables+=("$table")
}

capture fp8
capture bf16 --no-fp8
capture fp8-fused --fuse-wgrad
capture bf16-fused --no-fp8 --fuse-wgrad
capture fp8-checkpoint --checkpoint nonreentrant
capture fp8-pure-fsdp2 --precision pure --fsdp 2
capture fp8-fsdp1-reentrant --fsdp 1 --checkpoint reentrant
python3 tests/gpu/te_gpu.py "${tables[@]}" || failed=1
exit $failed
