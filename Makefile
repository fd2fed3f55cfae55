# Set-up, checks, tests, the demo and the measurements; CI runs the same `make test` as a person.

# The interpreter that makes the environment: 3.10 or newer.
PYTHON ?= python3

# What is tried, oldest first. Without TORCH, `make setup` takes the newest of them that the index has for CPUs, else the
# newest that it has for this Python.
TESTED := 2.13.0 2.15.0
# TORCH=2.15.0 takes this release, into an environment of its own.
TORCH :=
# 77 reads the licence as pyproject.toml gives it; Horovod's build needs one below 81.
BUILD_TOOLS := 'setuptools>=77,<81' wheel
# For its tests. A folder of its own keeps its mpirun apart from Open MPI's.
MPICH := mpich==5.0.2

# How many tests run at a time: they wait for the programs that they start, so that three fit on two cores.
JOBS ?= 3

# Where it is set, every process of the tests compiles what it imports of this tree.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv$(TORCH:%=-torch%)
BIN := $(VENV)/bin
# Twice quiet: errors are shown, warnings are not.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
# There while packages are being installed. Found at the start, it means that this was broken off: begin again.
HALF := $(VENV)/.half-installed
# Holds the checksum of what the set-up was made from.
READY := $(VENV)/.ready
SOURCES := Makefile pyproject.toml setup.py $(wildcard dualdist/csrc/* dualdist/horovod_build/*.py)
CHECKSUM := $(shell cat $(SOURCES) | cksum)
NEEDED := griffe hypothesis jinja2 kubeflow.training kubeflow_trainer_api material matplotlib PIL mpi4py proselint pydantic pytest sklearn yaml
WORKS := test -x $(BIN)/horovodrun && $(BIN)/python -Ic \
	"import importlib.util, horovod.torch; assert all(map(importlib.util.find_spec, '$(NEEDED)'.split()))"

# Prints which torch to install; one that is there and is tested stays.
CHOOSE := have=$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("torch").split("+")[0])' 2>/dev/null); \
	case " $(TESTED) " in *" $$have "*) echo $$have; exit;; esac; \
	index=$$($(BIN)/python -m pip --disable-pip-version-check index versions torch 2>/dev/null); any=$(lastword $(TESTED)); cpu=; \
	for each in $(TESTED); do \
		case "$$index," in *" $$each+cpu,"*) cpu=$$each;; *" $$each,"*) any=$$each;; esac; done; echo $${cpu:-$$any}

.PHONY: setup install demo dist bench launch reference docs docs-serve docs-pictures check clean
.PHONY: test test-all test-newest test-core test-gpu docker-test

setup:
ifneq ($(origin PYTHON),file)
	@[ -e $(HALF) ] || [ ! -x $(BIN)/python ] || [ "$$($(BIN)/python -V)" = "$$($(PYTHON) -V)" ] || { \
		echo "$(VENV) has $$($(BIN)/python -V), not $(PYTHON): name another folder, e.g. VENV=.venv-$(notdir $(PYTHON))" >&2; exit 1; }
endif
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
	@torch=torch==$(or $(TORCH),$$($(CHOOSE))); echo "installing $$torch"; $(PIP) $$torch torchvision $(BUILD_TOOLS) && \
		echo "installing dualdist and the packages around it" && $(PIP) $$torch --no-build-isolation \
		--editable '.[mpi,horovod,hvd,job,bench,compare,examples,curves,test,docs,plugins]'
	@$(PIP) --no-deps --ignore-installed --prefix $(VENV)/mpich $(MPICH)
	@rm $(HALF)
	@$(BIN)/dualdist install-horovod
	@($(WORKS)) >/dev/null
	@echo "$(CHECKSUM)" >$(READY)

demo: setup
	$(BIN)/python examples/demo.py

# sdist and wheel, in dist/. The wheel is pure Python: it fits every torch, and has no extension, which needs one torch.
dist: setup
	rm -rf dist
	DUALDIST_NO_EXTENSION=1 $(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

# The files under launch/, from its job files.
launch: setup
	@for job in $(basename $(notdir $(wildcard launch/jobs/*.yaml))); do \
		case $$job in kubernetes-*) file=launch/$$job.yaml;; *) file=launch/$$job.sh;; esac; \
		$(BIN)/dualdist run --config launch/jobs/$$job.yaml --scheduler $${job%%-*} >$$file || exit; done

# The parts of docs/pages/reference that docstrings and parsers have.
reference: setup
	$(BIN)/python docs/reference.py

# The manual, in build/docs; fails at a warning or a dead link, and needs no network.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
docs: setup
	$(MKDOCS) build --strict --config-file docs/mkdocs.yml

docs-serve: setup
	$(MKDOCS) serve --config-file docs/mkdocs.yml

# Compares for some minutes, and wants a quiet machine and a browser. FROM=DIR takes the output of a comparison that is there.
docs-pictures: setup
	$(BIN)/python docs/pictures.py $(FROM)

# Takes long, and wants a quiet machine. BENCH adds options to the first two, e.g. BENCH='--launches 5'.
bench: setup
	$(BIN)/dualdist bench step $(BENCH)
	$(BIN)/dualdist bench allreduce $(BENCH)
	$(BIN)/dualdist bench startup
	$(BIN)/dualdist bench state

PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadgroup --no-loadscope-reorder

# With TORCHES='2.13.0 2.15.0', `make test` and `make test-all` test each of these in turn, in its own environment.
ifneq ($(TORCHES),)
test test-all:
	@for torch in $(TORCHES); do echo "torch $$torch"; $(MAKE) --no-print-directory $@ TORCH=$$torch TORCHES= || exit; done
else
# In minutes: laws, unit tests, and a smoke test of everything that a person starts.
test: check
	$(PYTEST) -m "not full"

# Everything: `make test`, then every launcher with every backend, Slurm, hosts, images, and faults in their longer forms.
test-all: test
	$(PYTEST) -m full
endif

# `make test-core` with the newest tested torch, in an environment of its own: gigabytes of downloads, and a build of
# Horovod. Where the index does not have it for this Python, it says so.
NEWEST := $(lastword $(TESTED))
test-newest:
	@if [ -e .venv-torch$(NEWEST)/.ready ] || \
		$(PYTHON) -m pip --disable-pip-version-check index versions torch 2>/dev/null | grep -qwF $(NEWEST); then \
		$(MAKE) --no-print-directory test-core TORCH=$(NEWEST); \
	else echo "torch $(NEWEST) was not tested: the package index does not have it for $$($(PYTHON) -V)"; fi

# What another torch breaks first: set-up has built Horovod and the C++ extension; then unit tests, and the laws in two cells.
test-core: setup
	$(BIN)/dualdist info | grep "with the C++ extension"
	$(PYTEST) -m "not full" tests/unit tests/contract -k "not test_laws or spawn-default-shm-2 or horovodrun-gloo-default-gloo-2"

# On a machine with a GPU and a torch for CUDA or ROCm; elsewhere its tests are skipped. Its last table, with card and
# driver, goes into docs/pages/design/measurements.md.
test-gpu: setup
	$(BIN)/python -m pytest tests/launch/test_gpu.py
	@gpus=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count())'); \
	if [ "$$gpus" -gt 0 ]; then $(BIN)/dualdist bench step --device cuda -np $$gpus --backend native \
		--model resnet50 --model transformer100m --contenders none,ddp,ddp_view,ddp_best,fsdp2,dualdist; \
	else echo "torch sees no GPU here: nothing was measured"; fi

# The images' test, with Horovod built in it, too; `make test-all` takes the wheel that set-up has built.
docker-test: setup
	DUALDIST_DOCKER=full $(BIN)/python -m pytest tests/docker

# The demo and the manual's generator use more of the package than its public names.
check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy examples/demo.py docs/reference.py docs/prose.py
	$(BIN)/lint-imports --no-cache
	$(BIN)/shellcheck .ci/run launch/*.sh docker/*.sh
	$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.cuda
	$(BIN)/python docs/reference.py --check
	$(BIN)/python docs/prose.py

clean:
	rm -rf $(VENV)
