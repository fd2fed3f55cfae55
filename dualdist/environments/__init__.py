"""Which launcher started this process, from the variables alone: one file an environment, asked in ORDER.

Importing this starts nothing, reads nothing and loads neither torch nor MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dualdist.environments import (
    env_vars,
    flux,
    horovodrun,
    hydra,
    jsm,
    mvapich,
    openmpi,
    override,
    pals,
    pbs,
    pmi,
    single,
    slurm,
    torchrun,
)
from dualdist.environments.env_values import require_agreement
from dualdist.topology import Topology

Detect = Callable[[Mapping[str, str]], Topology | None]

# What a user or torchrun says about RANK and WORLD_SIZE is their own; it is not held against anything.
FINAL: tuple[Detect, ...] = (
    override.detect,  # the user's last word on any disagreement
    torchrun.detect,  # the innermost: srun and mpirun start its agents, one a node
)
LAUNCHERS: tuple[Detect, ...] = (
    horovodrun.detect,  # started over ssh, from within a job as well
    jsm.detect,  # its Spectrum MPI sets Open MPI's variables too
    mvapich.detect,  # its mpiexec is a Hydra with variables of its own
    openmpi.detect,  # before Slurm: mpirun's ranks inherit the step of the daemon that srun started
    pals.detect,  # before Hydra: it may set Hydra's local ranks too
    hydra.detect,  # before Slurm, as Open MPI
    flux.detect,  # before Slurm: an instance of Flux may run as a step
    slurm.detect,  # a real step, no batch script and no shell
    pmi.detect,  # after all that set PMI_RANK beside variables that say more
)
OTHERWISE: tuple[Detect, ...] = (
    env_vars.detect,  # RANK and WORLD_SIZE without a launcher
    pbs.refuse,  # pbsdsh, which numbers its tasks and names no size
    single.detect,  # nothing
)
ORDER = FINAL + LAUNCHERS + OTHERWISE


def detect(environ: Mapping[str, str]) -> Topology:
    """This process's place in its job, from the given variables and nothing else.

    Raises TopologyError where they are half-set, impossible or contradict each other; never a silent job of one.
    """
    for ask in ORDER:
        found = ask(environ)
        if found is not None:
            if ask in LAUNCHERS:
                require_agreement(environ, found, torchrun.VARIABLES)
            return found
    raise AssertionError("the last environment answers always")
