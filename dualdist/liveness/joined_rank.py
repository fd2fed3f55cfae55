"""The rank that this process has joined its job as: marked in the environment, which processes that it starts inherit.

Such a process finds the variables of the rank's launcher, too, and would be the same rank a second time. Processes that
only lead to a rank (a shell, numactl, a script that starts the program) have not joined and set no mark.
"""

import json
import zlib
from collections.abc import Mapping, MutableMapping

from dualdist.environments.horovodrun import STORE_PORT
from dualdist.environments.outer_job import rank_variables
from dualdist.environments.slurm import PMIX_NAMESPACE, STEP_IDS
from dualdist.environments.torchrun import RUN_ID
from dualdist.errors import TopologyError
from dualdist.liveness.process_state import ENDED, ProcessIdentity, current_process
from dualdist.topology import Topology
from dualdist.utils.variables import RANK_PROCESS, SPAWN_RENDEZVOUS

# These differ between two jobs of one launcher whose ranks have the same numbers.
JOB_NAMES = (RUN_ID, STORE_PORT, PMIX_NAMESPACE, *STEP_IDS, SPAWN_RENDEZVOUS)


def mark_rank(environ: MutableMapping[str, str], topology: Topology) -> None:
    """Mark this process as a rank that has joined; a job of one rank needs no mark."""
    if topology.size > 1:
        environ[RANK_PROCESS] = json.dumps([current_process().dumps(), topology.rank, _fingerprint(environ, topology)])


def unmark_rank(environ: MutableMapping[str, str]) -> None:
    environ.pop(RANK_PROCESS, None)


def refuse_child(environ: Mapping[str, str], topology: Topology) -> None:
    """Raise TopologyError if a process that has joined this job started this one, with the same variables.

    A job of one rank is a job of its own.
    """
    if topology.size == 1:
        return
    try:
        dumped, rank, fingerprint = json.loads(environ.get(RANK_PROCESS, ""))
        process = ProcessIdentity.loads(dumped)
    except (ValueError, TypeError, RecursionError):
        return
    has_ended = process.state() in ("", ENDED)  # "" in another container
    if has_ended or process == current_process() or fingerprint != _fingerprint(environ, topology):
        return
    names = rank_variables(environ)
    raise TopologyError(
        f"this process is a child of rank {rank} of {topology.size} (process {process.pid}), which has joined the job "
        f"that {topology.launcher} started, and is no rank itself. To make it a job of its own, start it without what "
        f"it inherited: env {' '.join(f'-u {name}' for name in names)} python ..."
    )


def _fingerprint(environ: Mapping[str, str], topology: Topology) -> int:
    names = [*(name for _, name in topology.origins), *JOB_NAMES]
    return zlib.crc32(json.dumps([(name, environ.get(name)) for name in names]).encode())
