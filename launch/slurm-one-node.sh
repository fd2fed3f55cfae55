#!/bin/bash
# Slurm, torchrun: 1 node, 4 ranks on each. Made by `dualdist run --scheduler`, see launch/README.md.
# Not run on GPUs yet: dualdist's tests have CPUs only.

# ==== edit from here ====
#SBATCH --job-name=train
#SBATCH --output=%x-%j.out
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --mem=256G
#SBATCH --time=02:00:00
#SBATCH --partition=gpu
#SBATCH --account=project
ranks_per_node=4
program=(train.py --epochs 90)
variables=(OMP_NUM_THREADS=8 PYTHONUNBUFFERED=1) # of every rank
setup() { # makes python the one that has dualdist
    module purge
    module load python/3.11 cuda/12.6
    . "$HOME/venvs/dualdist/bin/activate"
}
# ==== to here; what follows needs no change ====

set -eo pipefail
setup
export "${variables[@]}"
torchrun --standalone --nproc-per-node="$ranks_per_node" "${program[@]}"
