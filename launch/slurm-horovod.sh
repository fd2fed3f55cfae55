#!/bin/bash
# Slurm, srun: 4 nodes, 4 ranks on each. Made by `dualdist run --scheduler`, see launch/README.md.
# Not run on GPUs yet: dualdist's tests have CPUs only.

# ==== edit from here ====
#SBATCH --job-name=train
#SBATCH --output=%x-%j.out
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --mem=256G
#SBATCH --time=02:00:00
#SBATCH --partition=gpu
#SBATCH --account=project
program=(train.py --epochs 90)
variables=(OMP_NUM_THREADS=8 PYTHONUNBUFFERED=1 DUALDIST_BACKEND=horovod) # of every rank
setup() { # makes python the one that has dualdist
    module purge
    module load python/3.11 cuda/12.6
    . "$HOME/venvs/dualdist/bin/activate"
}
# ==== to here; what follows needs no change ====

set -eo pipefail
setup
export "${variables[@]}"
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
srun --kill-on-bad-exit=1 python -m dualdist exec "${program[@]}"
