#!/bin/bash
# LSF, mpirun: 4 nodes, 4 ranks on each. Made by `dualdist run --scheduler`, see launch/README.md.
# Not run on GPUs yet: dualdist's tests have CPUs only.

# ==== edit from here ====
#BSUB -J train
#BSUB -o %J.out
#BSUB -n 16
#BSUB -R "span[ptile=4]"
#BSUB -R "affinity[core(8)]"
#BSUB -gpu "num=4:mode=shared"
#BSUB -R "rusage[mem=256GB]"
#BSUB -W 2:00
#BSUB -r
#BSUB -Q 75
#BSUB -wa USR1
#BSUB -wt 2
#BSUB -q gpu
#BSUB -P project
program=(train.py --epochs 90)
variables=(OMP_NUM_THREADS=8 PYTHONUNBUFFERED=1) # of every rank
setup() { # makes python the one that has dualdist
    module purge
    module load python/3.11 cuda/12.6 openmpi/4.1
    . "$HOME/venvs/dualdist/bin/activate"
}
# ==== to here; what follows needs no change ====

set -eo pipefail
# When this file appears the ranks save and stop; then rank 0 writes a second one, .done.
DUALDIST_NOTICE="$LS_SUBCWD/.dualdist-stop-$LSB_JOBID"
variables+=("DUALDIST_NOTICE=$DUALDIST_NOTICE")
rm -f "$DUALDIST_NOTICE" "$DUALDIST_NOTICE.done"
trap 'touch "$DUALDIST_NOTICE"' USR1
job() {
    setup
    export "${variables[@]}"
    "$(command -v mpirun)" -n "$LSB_DJOB_NUMPROC" --bind-to none \
        env PATH="$PATH" LD_LIBRARY_PATH="$LD_LIBRARY_PATH" "${variables[@]}" \
        python -m dualdist exec "${program[@]}"
}
job &
while kill -0 "$!" 2> /dev/null; do
    wait "$!" || true
done
code=0
wait "$!" || code=$?
ls "$LS_SUBCWD" > /dev/null # so that NFS looks again
stopped=
if [ -e "$DUALDIST_NOTICE" ] && [ -e "$DUALDIST_NOTICE.done" ]; then stopped=yes; fi
rm -f "$DUALDIST_NOTICE" "$DUALDIST_NOTICE.done"
if [ -n "$stopped" ]; then exit 75; fi
exit "$code"
