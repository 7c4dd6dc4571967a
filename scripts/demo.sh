#!/usr/bin/env bash
# The whole workflow on a small job: a tiny Llama, FSDP2, two ranks, on the CPU of any machine.
# Reads nothing; writes demo/ (shapes.csv, candidates.csv, tuned.csv, replay.json).
set -euo pipefail
cd "$(dirname "$0")/.."

step() { # a sentence of why, the command as one would type it, the command
  printf '\n\033[1m# %s\033[0m\n$ %s\n' "$1" "${*:2}"
  "${@:2}"
}
rows() { grep -cv '^#' "$1" | awk '{ print $1 - 1 }'; } # without the header

rm -rf demo && mkdir demo
step "What does this machine have? A CPU is enough for the demo." gemmtune doctor

# A GPU, if there is one, is left out, so that the demo is the same on every machine. Two ranks
# share the machine: one thread each, and as many for the sweep.
export CUDA_VISIBLE_DEVICES=-1 HIP_VISIBLE_DEVICES=-1 OMP_NUM_THREADS=1
job=(torchrun --nproc-per-node 2 -m gemmtune.llama --model tiny --fsdp 2)

step "Run the training job as it is and record the matrix products (GEMMs) of one step." \
  gemmtune capture -o demo/shapes.csv --stop -- "${job[@]}" --steps 5
step "Time the algorithms that the libraries have for each GEMM; check their results first." \
  gemmtune sweep demo/shapes.csv -o demo/tuned.csv
step "A faster GEMM need not make a faster step: run the job, default and tuned in turn, and see." \
  gemmtune replay demo/tuned.csv -o demo/replay.json --budget 60s -- "${job[@]}" --steps 5000 |
  grep -v '^step '
step "From now on, train with the table on; the training script stays as it is." \
  gemmtune run demo/tuned.csv -- "${job[@]}" --steps 5

printf '\n\033[1mSummary\033[0m\n'
cat <<END
  demo/shapes.csv      $(rows demo/shapes.csv) rows: the GEMMs of a training step, where in the model and how often
  demo/tuned.csv       $(rows demo/tuned.csv) GEMMs with an algorithm that is faster than the default on this machine
  demo/replay.json     what that is worth in the step itself:
                       $(python -c 'import json; print(json.load(open("demo/replay.json"))["verdict"]["text"])')

  A tiny model on a CPU gains little, if anything. The commands are the same for a real job:
    gemmtune capture -o shapes.csv -- YOUR COMMAND
    gemmtune sweep shapes.csv
    gemmtune replay tuned.csv -- YOUR COMMAND
    gemmtune run tuned.csv -- YOUR COMMAND
END
