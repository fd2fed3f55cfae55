"""Choices that cannot go together, found before anything starts: the same for a job file and a command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dualdist.launch import units
from dualdist.utils.suggest import did_you_mean

WITHOUT_MPI = ("torchrun", "horovodrun", "spawn", "python")
WITH_MPI = ("mpirun", "horovodrun-mpi")
# The launcher that goes on with fewer ranks.
KEEPING = "horovodrun"
# What carries each backend's tensors.
CARRIERS = {"native": ("gloo", "shm", "nccl"), "horovod": ("gloo", "mpi", "nccl"), "mpi": ("mpi",)}
REBUILD = "build one with MPI by dualdist install-horovod --force"
INSTEAD = "choose mpirun, horovodrun-mpi or srun"
# Two ways to ask a scheduler for one thing.
RIVALS = (("gpus_per_node", "gpus_per_task"), ("memory", "memory_per_task"), ("partition", "queue"))


@dataclass(frozen=True)
class JobChoices:
    """What of a job decides whether its parts fit together; None for what is left open."""

    launcher: str | None = None
    backend: str | None = None
    transport: str | None = None
    ranks: int | None = None
    has_hosts: bool = False
    min_ranks: int | None = None


@dataclass(frozen=True)
class Conflict:
    """One sentence, and the setting that it is about."""

    setting: str
    message: str


def impossible(choice: JobChoices, *, horovod_has_mpi: bool | None, instead: str = INSTEAD) -> Iterator[Conflict]:
    """What cannot go together; `horovod_has_mpi` is the installed Horovod's, None where that is not known.

    `instead` is what to do where the launcher starts no MPI.
    """
    launcher, backend, transport = choice.launcher, choice.backend, choice.transport
    if launcher in WITHOUT_MPI:
        for setting, value in (("backend", backend), ("transport", transport)):
            if value == "mpi":
                why = f"the {setting} mpi needs a launcher that starts MPI, not {launcher}: {instead}"
                yield Conflict(setting, why)
    if backend in CARRIERS and transport is not None and transport not in CARRIERS[backend]:
        valid = CARRIERS[backend]
        told = f"expected one of {', '.join(valid)} for the backend {backend}, not {transport}"
        yield Conflict("transport", told + did_you_mean(transport, valid))
    if horovod_has_mpi is False and backend == "horovod":
        yield from _without_mpi(launcher, transport)
    if choice.min_ranks is not None and launcher not in (None, KEEPING):
        why = f"only {KEEPING} keeps ranks when others are lost, not {launcher}: choose it, or max_restarts"
        yield Conflict("min_ranks", why)
    if launcher == "python" and (choice.has_hosts or choice.ranks not in (None, 1)):
        yield Conflict("launcher", "plain python starts one rank on this host: choose torchrun, mpirun or spawn")


def impossible_resources(asked: Mapping[str, Any]) -> Iterator[Conflict]:
    """What a scheduler cannot be asked for together; None, or no key, for what is left open."""
    for one, other in RIVALS:
        if asked.get(one) is not None and asked.get(other) is not None:
            yield Conflict(other, f"{one} {asked[one]} and {other} {asked[other]} ask for one thing twice: give one")
    tasks, gpus = asked.get("tasks_per_node"), asked.get("gpus_per_node")
    if tasks and gpus and gpus < tasks:
        yield Conflict(
            "gpus_per_node",
            f"{tasks} tasks and {gpus} GPUs on each node: two ranks would share a GPU, which NCCL refuses; "
            f"ask for {gpus} tasks, or for no GPUs",
        )
    time, notice = asked.get("time"), asked.get("requeue")
    if time is not None and notice is not None and (seconds := units.duration(time)) <= notice:
        yield Conflict("requeue", f"requeue {notice}: the job has {seconds} seconds; expected fewer than that")


def unfit(ranks: int | None, nodes: int | None, tasks_per_node: int | None) -> str:
    """Why so many ranks do not fit on the nodes; "" where they do, or where a number is left open."""
    if ranks is None or not nodes or (ranks % nodes == 0 and tasks_per_node in (None, ranks // nodes)):
        return ""
    on_each = "the same number" if tasks_per_node is None else str(tasks_per_node)
    return f"{ranks} ranks on {nodes} nodes with {on_each} on each: the numbers do not fit together"


def _without_mpi(launcher: str | None, transport: str | None) -> Iterator[Conflict]:
    """For an installed Horovod without MPI."""
    if transport == "mpi":
        yield Conflict("transport", f"the installed Horovod was built without MPI: {REBUILD}")
    elif launcher in WITH_MPI and transport is None:
        yield Conflict(
            "launcher",
            f"{launcher} starts MPI, but the installed Horovod was built without it: choose torchrun or the "
            f"transport gloo, or {REBUILD}",
        )
