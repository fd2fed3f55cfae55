#!/bin/bash
# PBS, mpirun: 4 nodes, 4 ranks on each. Made by `dualdist run --scheduler`, see launch/README.md.
# Not run on GPUs yet: dualdist's tests have CPUs only.

# ==== edit from here ====
#PBS -N train
#PBS -j oe
#PBS -l select=4:ncpus=32:mpiprocs=4:ngpus=4:mem=256gb
#PBS -l place=scatter
#PBS -l walltime=02:00:00
#PBS -q gpu
#PBS -A project
# Torque knows no select and place; there, instead of these two lines:
##PBS -l nodes=4:ppn=4:gpus=4
program=(train.py --epochs 90)
variables=(OMP_NUM_THREADS=8 PYTHONUNBUFFERED=1) # of every rank
setup() { # makes python the one that has dualdist
    module purge
    module load python/3.11 cuda/12.6 openmpi/4.1
    . "$HOME/venvs/dualdist/bin/activate"
}
# ==== to here; what follows needs no change ====

set -eo pipefail
cd "$PBS_O_WORKDIR"
setup
export "${variables[@]}"
"$(command -v mpirun)" -n "$(wc -l < "$PBS_NODEFILE")" --bind-to none --machinefile "$PBS_NODEFILE" \
    env PATH="$PATH" LD_LIBRARY_PATH="$LD_LIBRARY_PATH" "${variables[@]}" \
    python -m dualdist exec "${program[@]}"
