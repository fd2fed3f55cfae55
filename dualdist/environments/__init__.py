"""Launcher detection: one function per launcher, from environment variables to a Topology, tried in ORDER.

A launcher that is added here also gets a LauncherFamily in precedence.py, for `dualdist doctor --explain-env`.
Importing this package reads nothing and loads neither torch nor MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dualdist.environments import explicit, horovodrun, mpi, pbs, slurm, torchrun
from dualdist.environments.env_values import require_agreement
from dualdist.topology import Topology

Detect = Callable[[Mapping[str, str]], Topology | None]

# A user's or torchrun's RANK and WORLD_SIZE are final: they are not compared with other variables.
FINAL: tuple[Detect, ...] = (
    explicit.detect_override,  # the user's answer to any disagreement
    torchrun.detect,  # the innermost launcher: srun and mpirun start its agents, one per node
)
LAUNCHERS: tuple[Detect, ...] = (
    horovodrun.detect,  # starts ranks over ssh, also from within a job
    mpi.detect_jsm,  # its Spectrum MPI sets Open MPI's variables too
    mpi.detect_mvapich,  # its mpiexec is a Hydra with additional variables
    mpi.detect_openmpi,  # before Slurm: mpirun's ranks inherit the step of the daemon that srun started
    mpi.detect_pals,  # before Hydra: it may set Hydra's local ranks too
    mpi.detect_hydra,  # before Slurm, as Open MPI
    mpi.detect_flux,  # before Slurm: a Flux instance may run as a step
    slurm.detect,  # a task of a step, not a batch script or a shell
    mpi.detect_pmi,  # after all launchers that set PMI_RANK and more specific variables
)
FALLBACKS: tuple[Detect, ...] = (
    explicit.detect_env,  # RANK and WORLD_SIZE without a launcher
    pbs.refuse_pbsdsh,  # numbers its tasks, but gives no size
    explicit.detect_single,  # no variables at all
)
ORDER = FINAL + LAUNCHERS + FALLBACKS


def detect(environ: Mapping[str, str]) -> Topology:
    """Return this process's Topology, from `environ` alone.

    Raises:
        TopologyError: The variables are incomplete, impossible or contradict each other. They never silently
            result in a job of one rank.
    """
    for detect_launcher in ORDER:
        topology = detect_launcher(environ)
        if topology is not None:
            if detect_launcher in LAUNCHERS:
                require_agreement(environ, topology, torchrun.VARIABLES)
            return topology
    raise AssertionError("detect_single always returns a Topology")
