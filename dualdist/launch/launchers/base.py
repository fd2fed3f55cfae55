"""The description of a launcher: what it starts, what it is restricted to, and how to install it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from dualdist.launch.job import Command, Job, LauncherProgram, Site
from dualdist.launch.script_request import ScriptRequest


@dataclass(frozen=True)
class Launcher:
    """A launcher: the command lines by which it starts ranks, and its restrictions.

    Attributes:
        commands: returns the commands that together start a job; None if only job scripts use the launcher.
        programs: what it runs besides python, and how to install that.
        mpi: whether it starts the ranks as MPI processes; "optional": if their backend or transport needs MPI.
        is_single_rank: it starts one rank, on this host.
        uses_allocation: without hosts, it starts the ranks on the nodes of the scheduler's allocation.
        uses_task_cpus: Slurm gives each rank the cores of a task.
        elastic: who continues with fewer ranks while lost ones restart: the launcher "itself", or `dualdist run`, which
            starts each of its commands again.
        repeats_failures: it describes on stderr, at length, what `dualdist run` says of a failure in a line.
        script_refusals: yields an error message for each thing that it cannot do in a job script.
    """

    name: str
    commands: Callable[[Job, Site], tuple[Command, ...]] | None
    programs: tuple[LauncherProgram, ...] = ()
    mpi: Literal["never", "optional", "always"] = "never"
    is_single_rank: bool = False
    uses_allocation: bool = False
    uses_task_cpus: bool = False
    elastic: Literal["no", "itself", "dualdist run"] = "no"
    repeats_failures: bool = False
    script_refusals: Callable[[ScriptRequest], Iterator[str]] = lambda request: iter(())
