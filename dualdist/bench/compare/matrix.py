"""The contenders of a comparison: a cell is (launcher, backend, transport); baselines run beside; some cannot run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dualdist.backends.availability import Availability
from dualdist.bench.jobs import MeasurementSettings, RunConfig, program_command
from dualdist.errors import DualdistError
from dualdist.launch.env_defaults import SLURM_JOB, default_launcher
from dualdist.launch.job import BACKEND_TRANSPORTS, JobChoices, find_conflicts
from dualdist.launch.launchers import Site, check_launcher
from dualdist.utils.suggest import require_choice

DUALDIST = "dualdist"
# What a reference is, and what it is called.
BASELINES = {
    "ddp": "DDP",
    "ddp_view": "DDP, gradient_as_bucket_view",
    "hvd": "raw Horovod",
    "none": "no communication",
    "one": "one rank",
}
DEFAULT_BASELINES = ("ddp", "hvd", "none", "one")
# They train, or nobody averages: their parameters and losses cannot agree with the others'.
APART = ("none", "one")


@dataclass(frozen=True)
class Cell:
    """One contender, launched as a job of its own. `slow` stretches its steps; `copy` tells equal ones apart."""

    kind: str
    config: RunConfig
    slow: float = 1.0
    copy: int = 0

    @property
    def is_reference(self) -> bool:
        return self.kind != DUALDIST

    @property
    def is_contender(self) -> bool:
        """Whether it may win: no reference, and no check of the tool itself."""
        return not self.is_reference and not self.copy

    @property
    def label(self) -> str:
        """As a sentence names it."""
        place = self.config
        over = f" over {place.transport}" if place.transport not in (None, place.backend) else ""
        if self.kind in APART:
            return BASELINES[self.kind]
        if self.kind != DUALDIST:
            return f"{BASELINES[self.kind]}{over} ({place.launcher})"
        again = f", slowed by {100 * (self.slow - 1):.3g}%" if self.slow > 1 else ", again" if self.copy else ""
        return f"{place.backend}{over} ({place.launcher}{again})"

    @property
    def key(self) -> str:
        """As files name it."""
        place = self.config
        words = [self.kind, place.backend, place.transport or "own", place.launcher]
        return "-".join([*words, *([f"copy{self.copy}"] if self.copy else [])])


@dataclass(frozen=True)
class MatrixFacts:
    """What decides which cells can run here, beside the launchers."""

    gpus: int
    device: str  # "auto", "cpu" or "cuda"
    backends: Mapping[str, Availability]
    is_in_slurm: bool
    is_script: bool = False

    @property
    def uses_gpus(self) -> bool:
        return self.gpus > 0 and self.device != "cpu"


@dataclass(frozen=True)
class RefusedCell:
    """A cell that cannot run here, and why."""

    cell: Cell
    reason: str


def expand_configs(
    launchers: Sequence[str] | None,
    backends: Sequence[str],
    transports: Sequence[str] | None,
    environ: Mapping[str, str],
) -> list[RunConfig]:
    """Every combination that was asked for; of what was left open, all transports, by the launcher that fits each."""
    for backend in backends:
        require_choice(backend, BACKEND_TRANSPORTS, "backend")
    valid = list(dict.fromkeys(name for carriers in BACKEND_TRANSPORTS.values() for name in carriers))
    for transport in transports or ():
        require_choice(transport, valid, "transport")
    found = [
        RunConfig(backend, transport, check_launcher(launcher))
        for backend in backends
        for transport in transports or BACKEND_TRANSPORTS[backend]
        for launcher in launchers or (default_launcher(environ, backend, transport)[0],)
    ]
    return list(dict.fromkeys(found))


def refusal_reason(place: RunConfig, setting: MeasurementSettings, site: Site, facts: MatrixFacts) -> str | None:
    """Why this place cannot be had here; None where nothing is known against it."""
    return next(_against(place, setting, site, facts), None)


def _against(place: RunConfig, setting: MeasurementSettings, site: Site, facts: MatrixFacts) -> Iterator[str]:
    # What no launcher can mend comes first.
    for launcher in (None, place.launcher):
        choice = JobChoices(launcher, place.backend, place.transport, setting.ranks)
        yield from (found.message for found in find_conflicts(choice, horovod_has_mpi=facts.backends["horovod"].mpi))
    installed = facts.backends[place.backend]
    if not installed.available:
        yield installed.reason
    if facts.is_script and place.launcher == "spawn":
        yield "spawn is one command a rank, and a comparison of scripts starts one for all: choose another launcher"
    try:
        program_command(place, ("-c", "pass"), setting, site)
    except DualdistError as error:
        yield str(error)
    if place.launcher == "srun" and not facts.is_in_slurm:
        yield f"this is no Slurm allocation ({SLURM_JOB} is not set): start it in one"
    if place.transport == "nccl":
        yield from _against_nccl(place, setting, facts)
    elif place.backend == "native" and place.transport is not None and facts.uses_gpus:
        yield "on GPUs the backend native moves tensors by nccl: add --device cpu"
    if place.backend == "horovod" and place.transport == "gloo" and installed.gloo is False:
        yield "the installed Horovod was built without Gloo"


def _against_nccl(place: RunConfig, setting: MeasurementSettings, facts: MatrixFacts) -> Iterator[str]:
    if not facts.uses_gpus:
        yield "nccl moves GPU tensors, and torch sees no GPU here" + (" with --device cpu" if facts.gpus else "")
    elif facts.gpus < setting.ranks:
        yield f"nccl wants a GPU for each rank: torch sees {facts.gpus}, and there are {setting.ranks} ranks"
    if place.backend == "horovod" and facts.backends["horovod"].nccl is None:
        yield "the installed Horovod was built without NCCL: dualdist install-horovod --gpu --force"


def split_runnable(
    places: Sequence[RunConfig], setting: MeasurementSettings, site: Site, facts: MatrixFacts
) -> tuple[list[Cell], list[RefusedCell]]:
    """The cells that can run here as far as is known, and the others."""
    cells = [Cell(DUALDIST, place) for place in places]
    reasons = {cell: refusal_reason(cell.config, setting, site, facts) for cell in cells}
    refused = [RefusedCell(cell, reason) for cell, reason in reasons.items() if reason is not None]
    return [cell for cell in cells if reasons[cell] is None], refused


def baseline_cells(names: Sequence[str], cells: Sequence[Cell], facts: MatrixFacts) -> Iterator[Cell | RefusedCell]:
    """The baselines that go with these cells; the names are those of BASELINES."""
    own = None if facts.uses_gpus else "gloo"
    for name in names:
        cell = Cell(name, RunConfig("native", own, "torchrun"))
        if name == "one":
            cell = Cell(name, RunConfig("auto", None, "python"))
        if name == "hvd":
            on_horovod = [each for each in cells if each.config.backend == "horovod"]
            cell = Cell(name, on_horovod[0].config if on_horovod else RunConfig("horovod", None, "torchrun"))
            if not on_horovod:
                yield RefusedCell(cell, "it needs a cell of the backend horovod that can run")
                continue
        yield cell
