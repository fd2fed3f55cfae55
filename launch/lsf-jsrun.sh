#!/bin/bash
# LSF, jsrun: 4 nodes, 4 ranks on each. Made by `dualdist run --scheduler`, see launch/README.md.
# Not run on GPUs yet: dualdist's tests have CPUs only.

# ==== edit from here ====
#BSUB -J train
#BSUB -o %J.out
#BSUB -nnodes 4
#BSUB -W 2:00
#BSUB -q batch
#BSUB -P project
ranks=16
ranks_per_node=4
cpus_per_rank=8
gpus_per_rank=1
program=(train.py --epochs 90)
variables=(OMP_NUM_THREADS=8 PYTHONUNBUFFERED=1) # of every rank
setup() { # makes python the one that has dualdist
    module load miniforge
    eval "$(conda shell.bash hook)"
    conda activate dualdist
}
# ==== to here; what follows needs no change ====

set -eo pipefail
setup
export "${variables[@]}"
export DUALDIST_RENDEZVOUS="file://$LS_SUBCWD/.dualdist-$LSB_JOBID"
jsrun --nrs "$ranks" --rs_per_host "$ranks_per_node" --tasks_per_rs 1 \
    --cpu_per_rs "$cpus_per_rank" --gpu_per_rs "$gpus_per_rank" --bind "packed:$cpus_per_rank" \
    python -m dualdist exec "${program[@]}"
