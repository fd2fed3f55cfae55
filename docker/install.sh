#!/bin/sh
# The steps of both Dockerfiles: makes /opt/dualdist, a virtual environment, and /layer, what is added to it last.
#
#     install.sh packages          everything that pip installs, at the versions of constraints.txt
#     install.sh dualdist [--gpu]  dualdist, and Horovod as `dualdist install-horovod` builds it
set -eu

TORCH=torch==2.13.0
# Without its dependencies, because they name torch again.
TORCHVISION=torchvision==0.28.0
EXTRAS=mpi,horovod,hvd,job,bench,compare,examples
PREFIX=/opt/dualdist
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_CONSTRAINT="$PWD/constraints.txt"

packages() {
    python3 -m venv "$PREFIX"
    pip_install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$TORCH" setuptools wheel
    pip_install --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$TORCHVISION"
    requirements "$EXTRAS" >requirements.txt
    pip_install --requirement requirements.txt
    # On all cores, which pip does not do; but for the packages' own tests, a fifth of all. Some packages have files that
    # are no Python of this version.
    "$PREFIX/bin/python" -m compileall -qq -j 0 -x '/tests/|/torch/testing/_internal/' "$PREFIX/lib" || true
}

pip_install() {
    "$PREFIX/bin/python" -m pip install --quiet --no-compile "$@"
}

# What the extras ask for, except cmake: the distribution's is used, and stays behind with the compiler.
requirements() {
    "$PREFIX/bin/python" - "$1" <<'PYTHON'
import sys, tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
wanted = {line for extra in sys.argv[1].split(",") for line in extras[extra]}
print("\n".join(sorted(line for line in wanted if not line.startswith("cmake"))))
PYTHON
}

dualdist() {
    touch /before
    "$PREFIX/bin/python" -m pip install --quiet --no-deps --no-build-isolation .
    "$PREFIX/bin/dualdist" install-horovod "$@"
    mkdir /layer
    cd /
    find "${PREFIX#/}" -cnewer /before ! -type d -exec cp --parents --no-dereference --preserve=mode,timestamps -t /layer {} +
}

"$@"
