#!/bin/bash
# Hosts by ssh, torchrun: 2 nodes, 4 ranks on each. Made by `dualdist run --scheduler`, see launch/README.md.
# Not run on GPUs yet: dualdist's tests have CPUs only.

# ==== edit from here ====
hosts=(node1 node2)
ranks_per_node=4
folder="$PWD"
program=(train.py --epochs 90)
variables=(OMP_NUM_THREADS=8 PYTHONUNBUFFERED=1) # of every rank
setup() { # makes python the one that has dualdist
    . "$HOME/venvs/dualdist/bin/activate"
}
# ==== to here; what follows needs no change ====

set -eo pipefail
setup
export "${variables[@]}"
nodes="${#hosts[@]}"
head="${hosts[0]}"
port="$(python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')" # free on this host, which has to be the first
# shellcheck disable=SC2329 # a shell on another host calls it
agent() {
    cd "$folder" || return
    setup
    export "${variables[@]}"
    exec torchrun --nnodes="$nodes" --nproc-per-node="$ranks_per_node" \
        --rdzv-backend=c10d --rdzv-id="$port" --rdzv-endpoint="$head:$port" \
        "${program[@]}"
}
# The shell of another host has none of these variables and functions: send their definitions.
agent_script="$(declare -f setup agent; declare -p folder program variables nodes ranks_per_node head port)"$'\n'agent
# With a terminal (-tt) the remote side ends together with this script.
pids=()
trap 'kill "${pids[@]}" 2> /dev/null || true' EXIT
for host in "${hosts[@]}"; do
    ssh -tt -o BatchMode=yes "$host" "bash -c $(printf %q "$agent_script")" < /dev/null &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
    wait "$pid" || code=$?
done
exit "$code"
