#!/bin/bash
# Slurm, horovodrun: 4 nodes, 4 ranks on each. Made by `dualdist run --scheduler`, see launch/README.md.
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
# horovodrun reaches the other nodes by ssh, which must not ask for a password.
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST" |
    awk -v slots="$SLURM_NTASKS_PER_NODE" '{ printf "%s%s:%s", comma, $1, slots; comma = "," }')"
# The launcher exports its whole environment to all hosts: give it what concerns a job, and no secrets.
secret='SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|(API|ACCESS|PRIVATE)_?KEY|TOKEN(_|$)|(^|_)KEY$|(^|_)(PASS|PW|PAT)(_|$)|_PWD$'
kept=()
for name in $(compgen -e); do
    if [[ "${name^^}" =~ $secret ]]; then continue; fi
    case "$name" in
        HOME | USER | LOGNAME | SHELL | LANG | TERM | TZ | TMPDIR | PATH | SSH_AUTH_SOCK | SSH_AGENT_PID | \
        LD_LIBRARY_PATH | PYTHONPATH | VIRTUAL_ENV | CONDA_PREFIX | PYTHONUNBUFFERED | LC_* | XDG_* | \
        PYTHON* | CUDA_* | OMPI_* | OPAL_* | PMIX_* | PRTE_* | DUALDIST_* | OMP_* | MKL_* | OPENBLAS_* | \
        TORCH_* | PYTORCH_* | NCCL_* | GLOO_* | HOROVOD_* | UCX_* | FI_*)
            kept+=("$name=${!name}")
            ;;
    esac
done
env -i "${kept[@]}" "${variables[@]}" \
    horovodrun --gloo -np "$SLURM_NTASKS" -H "$hosts" \
        python -m dualdist exec "${program[@]}"
