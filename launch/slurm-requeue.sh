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
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
#SBATCH --requeue
program=(train.py --epochs 90)
variables=(OMP_NUM_THREADS=8 PYTHONUNBUFFERED=1) # of every rank
setup() { # makes python the one that has dualdist
    module purge
    module load python/3.11 cuda/12.6
    . "$HOME/venvs/dualdist/bin/activate"
}
# ==== to here; what follows needs no change ====

set -eo pipefail
# When this file appears the ranks save and stop; then rank 0 writes a second one, .done.
DUALDIST_NOTICE="$SLURM_SUBMIT_DIR/.dualdist-stop-$SLURM_JOB_ID"
variables+=("DUALDIST_NOTICE=$DUALDIST_NOTICE")
rm -f "$DUALDIST_NOTICE" "$DUALDIST_NOTICE.done"
trap 'touch "$DUALDIST_NOTICE"' USR1
job() {
    setup
    export "${variables[@]}"
    export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
    srun --kill-on-bad-exit=1 python -m dualdist exec "${program[@]}"
}
job &
while kill -0 "$!" 2> /dev/null; do
    wait "$!" || true
done
code=0
wait "$!" || code=$?
ls "$SLURM_SUBMIT_DIR" > /dev/null # so that NFS looks again
stopped=
if [ -e "$DUALDIST_NOTICE" ] && [ -e "$DUALDIST_NOTICE.done" ]; then stopped=yes; fi
rm -f "$DUALDIST_NOTICE" "$DUALDIST_NOTICE.done"
if [ -n "$stopped" ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
