#!/bin/bash
# Slurm, srun: 8 nodes, 8 ranks on each. Made by `dualdist run --scheduler`, see launch/README.md.

# ==== edit from here ====
#SBATCH --job-name=train
#SBATCH --output=%x-%j.out
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=16
#SBATCH --mem=192G
#SBATCH --time=36:00:00
#SBATCH --partition=cpu
#SBATCH --account=project
program=(train.py --epochs 90)
variables=(OMP_NUM_THREADS=16 PYTHONUNBUFFERED=1 DUALDIST_BACKEND=mpi) # of every rank
setup() { # makes python the one that has dualdist
    module load miniforge
    eval "$(conda shell.bash hook)"
    conda activate dualdist
}
# ==== to here; what follows needs no change ====

set -eo pipefail
setup
export "${variables[@]}"
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
srun --kill-on-bad-exit=1 --mpi=pmix python -m dualdist exec "${program[@]}"
