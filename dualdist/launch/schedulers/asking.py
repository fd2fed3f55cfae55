"""From what a job file and options say to a Request: which launcher, how many ranks on each of how many nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dualdist.errors import UsageError
from dualdist.launch.option_conflicts import WITHOUT_MPI, Choice, impossible, unfit
from dualdist.launch.schedulers import Scheduler, find
from dualdist.launch.schedulers.request import Request


def requested(
    scheduler: str,
    program: tuple[str, ...],
    *,
    launcher: str | None = None,
    ranks: int | None = None,
    hosts: Sequence[str] = (),
    resources: Mapping[str, Any] | None = None,
    backend: str | None = None,
    transport: str | None = None,
    env: Mapping[str, str] | None = None,
    handed_on: Sequence[str] = (),
) -> Request:
    """The Request; `hosts` are names, or host:slots, and `resources` what a job file says under that key."""
    asked = {name: value for name, value in (resources or {}).items() if value is not None}
    if "partition" in asked:
        asked["queue"] = asked.pop("partition")
    if hosts and scheduler != "ssh":
        raise UsageError(
            f"hosts {','.join(hosts)}: {scheduler} chooses the nodes itself; leave them out, --nodes says how many"
        )
    names, slots = _hosts(hosts)
    nodes = asked.pop("nodes", len(names) or 1)
    tasks = asked.pop("tasks_per_node", slots)
    if tasks is None and ranks is None:
        tasks = asked.get("gpus_per_node") or 1
    return Request(
        program,
        _launcher(find(scheduler), Choice(launcher, backend, transport)),
        nodes=nodes,
        tasks_per_node=_tasks(tasks, ranks, nodes),
        hosts=names,
        setup=tuple(asked.pop("setup", ())),
        backend=backend,
        transport=transport,
        env={name: value for name, value in (env or {}).items() if name not in handed_on},
        handed_on=tuple(handed_on),
        **asked,
    )


def _launcher(scheduler: Scheduler, choice: Choice) -> str:
    """The one that was named, else the scheduler's first that starts what the job needs.

    UsageError where what was asked for cannot go together; which Horovod the job will find is not known here.
    """
    starts_mpi = [name for name in scheduler.launchers if name not in WITHOUT_MPI]
    wants_mpi = "mpi" in (choice.backend, choice.transport)
    launcher = choice.launcher or (starts_mpi if wants_mpi else scheduler.launchers)[0]
    instead = f"choose {' or '.join(starts_mpi)}"
    for found in impossible(replace(choice, launcher=launcher), horovod_has_mpi=None, instead=instead):
        raise UsageError(found.message)
    return launcher


def _tasks(tasks: int | None, ranks: int | None, nodes: int) -> int:
    """Ranks on each node: as said, or as the number of all ranks gives them."""
    if ranks is None or nodes < 1:
        return 1 if tasks is None else tasks
    if why := unfit(ranks, nodes, tasks):
        raise UsageError(why)
    return ranks // nodes


def _hosts(hosts: Sequence[str]) -> tuple[tuple[str, ...], int | None]:
    """The names of the hosts, and the slots that each has."""
    pairs = [host.partition(":")[::2] for host in hosts]
    counts = {slots for _, slots in pairs}
    if len(counts) > 1 or any(slots and not slots.isdecimal() for slots in counts):
        raise UsageError(
            f"hosts {','.join(hosts)}: a script wants the same number of slots on each, as host1:4,host2:4"
        )
    slots = counts.pop() if counts else ""
    return tuple(name for name, _ in pairs), int(slots) if slots else None
