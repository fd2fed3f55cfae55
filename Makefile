# Set-up, checks, tests, the demo and the measurements; CI runs the same `make test` as a person.

# The interpreter that makes .venv: 3.10 or newer.
PYTHON ?= python3

# A bare "torch" would be the newest one, which nothing here was tried with.
TORCH := torch==2.13.0
# Fits torch 2.13.0. It is installed without its dependencies, because they name torch again.
TORCHVISION := torchvision==0.28.0
# 77 reads the licence as pyproject.toml gives it; Horovod's build needs one below 81.
BUILD_TOOLS := 'setuptools>=77,<81' wheel
# For its tests. A folder of its own keeps its mpirun apart from Open MPI's.
MPICH := mpich==5.0.2

# How many tests run at a time: they wait for the programs that they start, so that three fit on two cores.
JOBS ?= 3

# Where it is set, every process of the tests compiles what it imports of this tree.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
BIN := $(VENV)/bin
# Twice quiet: errors are shown, warnings are not.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
# There while packages are being installed. Found at the start, it means that this was broken off: begin again.
HALF := $(VENV)/.half-installed
# Holds the checksum of what the set-up was made from.
READY := $(VENV)/.ready
SOURCES := Makefile pyproject.toml setup.py $(wildcard dualdist/horovod_build/*.py)
CHECKSUM := $(shell cat $(SOURCES) | cksum)
NEEDED := hypothesis jinja2 kubeflow.training matplotlib PIL mpi4py pydantic pytest sklearn yaml
WORKS := test -x $(BIN)/horovodrun && $(BIN)/python -Ic \
	"import importlib.util, horovod.torch; assert all(map(importlib.util.find_spec, '$(NEEDED)'.split()))"

.PHONY: setup install demo bench launch test test-all docker-test check clean

setup:
	@if [ "$$(cat $(READY) 2>/dev/null)" != "$(CHECKSUM)" ]; then $(MAKE) --no-print-directory install; \
	elif ! ($(WORKS)) >/dev/null 2>&1; then \
		echo "$(VENV) is damaged and is made anew"; touch $(HALF); $(MAKE) --no-print-directory install; fi

install:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "$(PYTHON) is no Python 3.10 or newer; name one: make setup PYTHON=python3.11" >&2; exit 1; }
	@if [ -e $(HALF) ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		rm -rf $(VENV) && mkdir $(VENV) && touch $(HALF) && echo "making $(VENV)" && $(PYTHON) -m venv $(VENV) || { \
		echo "$(PYTHON) cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 1; }; fi
	@rm -f $(READY) && touch $(HALF)
	@echo "installing $(TORCH)"
	@$(PIP) $(TORCH) $(BUILD_TOOLS)
	@echo "installing dualdist and the packages around it"
	@$(PIP) --no-deps $(TORCHVISION)
	@$(PIP) $(TORCH) --no-build-isolation --editable '.[mpi,horovod,hvd,job,bench,compare,examples,curves,test]'
	@$(PIP) --no-deps --ignore-installed --prefix $(VENV)/mpich $(MPICH)
	@rm $(HALF)
	@$(BIN)/dualdist install-horovod
	@$(BIN)/python -c "import torch; v = torch.__version__; assert v.split('+')[0] == '$(TORCH)'[7:], v"
	@($(WORKS)) >/dev/null
	@echo "$(CHECKSUM)" >$(READY)

demo: setup
	$(BIN)/python examples/demo.py

# The files under launch/, from its job files.
launch: setup
	@for job in $(basename $(notdir $(wildcard launch/jobs/*.yaml))); do \
		case $$job in kubernetes-*) file=launch/$$job.yaml;; *) file=launch/$$job.sh;; esac; \
		$(BIN)/dualdist run --config launch/jobs/$$job.yaml --scheduler $${job%%-*} >$$file || exit; done

# Takes long, and wants a quiet machine. BENCH adds options to the first two, e.g. BENCH='--launches 5'.
bench: setup
	$(BIN)/dualdist bench step $(BENCH)
	$(BIN)/dualdist bench allreduce $(BENCH)
	$(BIN)/dualdist bench startup
	$(BIN)/dualdist bench scale

PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadgroup --no-loadscope-reorder

# In minutes: laws, unit tests, and a smoke test of everything that a person starts.
test: check
	$(PYTEST) -m "not full"

# Everything: `make test`, then every launcher with every backend, Slurm, hosts, images, and faults in their longer forms.
test-all: test
	$(PYTEST) -m full

# The images' test, with Horovod built in it, too; `make test-all` takes the wheel that set-up has built.
docker-test: setup
	DUALDIST_DOCKER=full $(BIN)/python -m pytest tests/docker

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/shellcheck .ci/run launch/*.sh docker/*.sh
	$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.cuda

clean:
	rm -rf $(VENV)
