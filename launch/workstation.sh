#!/bin/bash
# A workstation, torchrun: 1 node, 4 ranks on each. Made by `dualdist run --scheduler`, see launch/README.md.
# Not run on GPUs yet: dualdist's tests have CPUs only.

# ==== edit from here ====
ranks_per_node=4
program=(train.py --epochs 90)
variables=(OMP_NUM_THREADS=8 PYTHONUNBUFFERED=1) # of every rank
setup() { # makes python the one that has dualdist
    . .venv/bin/activate
}
# ==== to here; what follows needs no change ====

set -eo pipefail
setup
export "${variables[@]}"
torchrun --standalone --nproc-per-node="$ranks_per_node" "${program[@]}"
