"""The hosts of this Slurm or PBS allocation, and the cores of each."""

import re
from collections.abc import Mapping
from pathlib import Path

from dualdist.environments import slurm
from dualdist.errors import LaunchError, UsageError
from dualdist.launch.env_defaults import SLURM_TASKS, allocated_tasks
from dualdist.launch.hosts import is_local_host, read_hostfile
from dualdist.launch.job import Host
from dualdist.utils.package_probe import run_tool

NODES, NODE_TASKS, NODE_CPUS = "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE"
PBS_JOB, PBS_HOSTS = "PBS_JOBID", "PBS_NODEFILE"


def allocated_hosts(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts of this Slurm or PBS allocation, with a slot per task; () outside, and in a step of srun."""
    if allocated_tasks(environ) is not None:
        names = _slurm_names(environ)
        has_tasks = bool(environ.get(SLURM_TASKS))  # without --ntasks Slurm counts cores
        slots = _counts(environ, NODE_TASKS) if has_tasks else [1] * len(names)
        return tuple(Host(name, count) for name, count in zip(names, slots, strict=True))
    if environ.get(PBS_JOB) and environ.get(PBS_HOSTS):
        return read_hostfile(Path(environ[PBS_HOSTS]))
    return ()


def spread(hosts: tuple[Host, ...], ranks: int) -> tuple[Host, ...]:
    """Return the nodes of an allocation with equally many of the ranks, unless these are as many as its tasks."""
    if ranks == sum(host.slots for host in hosts):
        return hosts
    if ranks % len(hosts):
        names = ",".join(host.name for host in hosts)
        raise UsageError(
            f"{ranks} ranks on the {len(hosts)} nodes of this allocation ({names}): expected a multiple of "
            f"{len(hosts)}, or -H with the ranks of each"
        )
    return tuple(Host(host.name, ranks // len(hosts)) for host in hosts)


def elastic_hosts(ranks: int | None, environ: Mapping[str, str]) -> tuple[tuple[Host, ...], int | None]:
    """Return the hosts of this allocation and the number of ranks, by default its tasks.

    There are no hosts outside of an allocation, where the ranks stay as given, and if this host is the only one.
    """
    hosts = allocated_hosts(environ)
    if not hosts:
        return (), ranks
    ranks = ranks or sum(host.slots for host in hosts)
    is_here = len(hosts) == 1 and is_local_host(hosts[0].name)
    return (() if is_here else spread(hosts, ranks)), ranks


def node_cores(environ: Mapping[str, str]) -> dict[str, int]:
    """Return the cores of each node of this Slurm allocation; {} outside of one."""
    if allocated_tasks(environ) is None:
        return {}
    return dict(zip(_slurm_names(environ), _counts(environ, NODE_CPUS), strict=True))


def _slurm_names(environ: Mapping[str, str]) -> list[str]:
    if re.fullmatch(r"[^\[,]+", environ.get(NODES, "")):  # one node, perhaps in a container without Slurm
        return [environ[NODES]]
    code, output = run_tool(["scontrol", "show", "hostnames", environ.get(NODES, "")], environ)
    if code != 0 or not output.split():
        raise LaunchError(f"`scontrol show hostnames {environ.get(NODES, '')}` names no nodes: {output.strip()}")
    return output.split()


def _counts(environ: Mapping[str, str], name: str) -> list[int]:
    """Return a number for each node of this allocation: "2(x2),1" is 2, 2 and 1."""
    matches = [slurm.COUNT.fullmatch(item) for item in environ.get(name, "").split(",")]
    if None in matches:
        raise LaunchError(f'{name}={environ.get(name, "")!r}: expected counts such as "2(x2),1"; is this a Slurm job?')
    return [int(match[1]) for match in matches if match for _ in range(int(match[2] or 1))]
