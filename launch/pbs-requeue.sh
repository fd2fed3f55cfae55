#!/bin/bash
# PBS, torchrun: 4 nodes, 4 ranks on each. Made by `dualdist run --scheduler`, see launch/README.md.
# Not run on GPUs yet: dualdist's tests have CPUs only.

# ==== edit from here ====
#PBS -N train
#PBS -j oe
#PBS -r y
#PBS -l select=4:ncpus=32:mpiprocs=1:ngpus=4:mem=256gb
#PBS -l place=scatter
#PBS -l walltime=02:00:00
#PBS -q gpu
#PBS -A project
# Torque knows no select and place; there, instead of these two lines:
##PBS -l nodes=4:ppn=32:gpus=4
ranks_per_node=4
notice_after=7080 # seconds; the rest of the walltime is for the checkpoint
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
DUALDIST_NOTICE="$PBS_O_WORKDIR/.dualdist-stop-$PBS_JOBID"
variables+=("DUALDIST_NOTICE=$DUALDIST_NOTICE")
rm -f "$DUALDIST_NOTICE" "$DUALDIST_NOTICE.done"
job() {
    cd "$PBS_O_WORKDIR"
    setup
    export "${variables[@]}"
    # The ranks meet on the first node, where this script runs: take a port that is free here.
    head="$(hostname)"
    port="$(python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')"
    folder="$PBS_O_WORKDIR"
    nodes="$(sort -u "$PBS_NODEFILE" | wc -l)"
    # shellcheck disable=SC2329 # a shell on another host calls it
    agent() {
        cd "$folder" || return
        setup
        export "${variables[@]}"
        exec torchrun --nnodes="$nodes" --nproc-per-node="$ranks_per_node" \
            --rdzv-backend=c10d --rdzv-id="$PBS_JOBID" --rdzv-endpoint="$head:$port" \
            "${program[@]}"
    }
    # The shell of another host has none of these variables and functions: send their definitions.
    agent_script="$(declare -f setup agent; declare -p folder program variables nodes ranks_per_node head port)"$'\n'agent
    # pbsdsh counts the lines of the nodefile from 0: one agent for the first line of each host.
    mapfile -t slots < <(awk '!seen[$1]++ { print NR - 1 }' "$PBS_NODEFILE")
    pids=()
    for slot in "${slots[@]}"; do
        pbsdsh -n "$slot" -- bash -c "$agent_script" &
        pids+=($!)
    done
    code=0
    for pid in "${pids[@]}"; do
        wait "$pid" || code=$?
    done
    exit "$code"
}
job &
while kill -0 "$!" 2> /dev/null; do
    sleep 1
    [ "$SECONDS" -lt "$notice_after" ] || touch "$DUALDIST_NOTICE"
done
code=0
wait "$!" || code=$?
ls "$PBS_O_WORKDIR" > /dev/null # so that NFS looks again
stopped=
if [ -e "$DUALDIST_NOTICE" ] && [ -e "$DUALDIST_NOTICE.done" ]; then stopped=yes; fi
rm -f "$DUALDIST_NOTICE" "$DUALDIST_NOTICE.done"
if [ -n "$stopped" ]; then exit 75; fi
exit "$code"
