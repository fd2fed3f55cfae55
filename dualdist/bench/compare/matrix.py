"""Cells of a comparison: launcher, backend and transport, the baselines, and why some cannot run here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dualdist.backends import registry
from dualdist.backends.registry import Availability
from dualdist.bench.jobs import MeasurementSettings, RunConfig, program_command
from dualdist.errors import DualdistError
from dualdist.launch.env_defaults import SLURM_JOB, default_launcher
from dualdist.launch.job import Site
from dualdist.launch.launchers import check_launcher, find_conflicts
from dualdist.utils.suggest import require_choice

DUALDIST = "dualdist"
BASELINES = {
    "ddp": "DDP",
    "ddp_view": "DDP, gradient_as_bucket_view",
    "hvd": "raw Horovod",
    "none": "no communication",
    "one": "one rank",
}
DEFAULT_BASELINES = ("ddp", "hvd", "none", "one")
NOT_AVERAGED = ("none", "one")  # no averaging over ranks: their losses and parameters differ from the others'


@dataclass(frozen=True)
class Cell:
    """One contender or baseline (`kind`), launched as a separate job.

    `slowdown` stretches its steps; `copy` distinguishes the repetitions of --self-check.
    """

    kind: str
    config: RunConfig
    slowdown: float = 1.0
    copy: int = 0

    @property
    def is_baseline(self) -> bool:
        return self.kind != DUALDIST

    @property
    def is_contender(self) -> bool:
        """Return True if it may win: neither a baseline nor a self-check."""
        return not self.is_baseline and not self.copy

    @property
    def label(self) -> str:
        """Return the name used in tables and sentences."""
        config = self.config
        over = f" over {config.transport}" if config.transport not in (None, config.backend) else ""
        if self.kind in NOT_AVERAGED:
            return BASELINES[self.kind]
        if self.is_baseline:
            return f"{BASELINES[self.kind]}{over} ({config.launcher})"
        copy = ", again" if self.copy else ""
        suffix = f", slowed by {100 * (self.slowdown - 1):.3g}%" if self.slowdown > 1 else copy
        return f"{config.backend}{over} ({config.launcher}{suffix})"

    @property
    def key(self) -> str:
        """Return the name used in file names."""
        config = self.config
        words = [self.kind, config.backend, config.transport or "own", config.launcher]
        return "-".join([*words, *([f"copy{self.copy}"] if self.copy else [])])


@dataclass(frozen=True)
class MatrixFacts:
    """Properties of this machine that decide which cells can run, besides its launchers."""

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
    """A cell that cannot run here, and the reason."""

    cell: Cell
    reason: str


def expand_configs(
    launchers: Sequence[str] | None,
    backends: Sequence[str],
    transports: Sequence[str] | None,
    environ: Mapping[str, str],
) -> list[RunConfig]:
    """Return every combination; None stands for all transports, or for the default launcher of each."""
    for backend in backends:
        require_choice(backend, registry.names(), "backend")
    valid = registry.transports()
    for transport in transports or ():
        require_choice(transport, valid, "transport")
    found = [
        RunConfig(backend, transport, check_launcher(launcher))
        for backend in backends
        for transport in transports or registry.get(backend).transports
        for launcher in launchers or (default_launcher(environ, backend, transport)[0],)
    ]
    return list(dict.fromkeys(found))


def refusal_reason(config: RunConfig, settings: MeasurementSettings, site: Site, facts: MatrixFacts) -> str | None:
    """Return why this configuration cannot run here, None if no reason is known."""
    return next(_reasons(config, settings, site, facts), None)


def _reasons(config: RunConfig, settings: MeasurementSettings, site: Site, facts: MatrixFacts) -> Iterator[str]:
    # Launcher-independent reasons first.
    for launcher in (None, config.launcher):
        has_mpi = facts.backends["horovod"].mpi
        found = find_conflicts(
            launcher, config.backend, config.transport, ranks=settings.ranks, horovod_has_mpi=has_mpi
        )
        yield from (message for _, message in found)
    installed = facts.backends[config.backend]
    if not installed.available:
        yield installed.reason
    if facts.is_script and config.launcher == "spawn":
        yield "a script does not spawn its ranks: choose another launcher"
    try:
        program_command(config, ("-c", "pass"), settings, site)
    except DualdistError as error:
        yield str(error)
    if config.launcher == "srun" and not facts.is_in_slurm:
        yield f"this is no Slurm allocation ({SLURM_JOB} is not set): start it in one"
    if config.transport == "nccl":
        yield from _nccl_reasons(config, settings, facts)
    elif registry.get(config.backend).uses_nccl_on_gpus and config.transport is not None and facts.uses_gpus:
        yield f"on GPUs the backend {config.backend} uses nccl: add --device cpu"
    if config.transport == "gloo" and installed.gloo is False:
        yield "the installed Horovod was built without Gloo"


def _nccl_reasons(config: RunConfig, settings: MeasurementSettings, facts: MatrixFacts) -> Iterator[str]:
    if not facts.uses_gpus:
        yield "nccl needs GPU tensors, and torch sees no GPU here" + (" with --device cpu" if facts.gpus else "")
    elif facts.gpus < settings.ranks:
        yield f"nccl needs a GPU per rank: torch sees {facts.gpus}, and there are {settings.ranks} ranks"
    if registry.uses_library(config.backend, registry.HOROVOD_LIBRARY) and facts.backends[config.backend].nccl is None:
        yield "the installed Horovod was built without NCCL: dualdist install-horovod --gpu --force"


def split_runnable(
    configs: Sequence[RunConfig], settings: MeasurementSettings, site: Site, facts: MatrixFacts
) -> tuple[list[Cell], list[RefusedCell]]:
    """Return the cells that can run here as far as is known, and the others with the reasons."""
    cells = [Cell(DUALDIST, config) for config in configs]
    reasons = {cell: refusal_reason(cell.config, settings, site, facts) for cell in cells}
    refused = [RefusedCell(cell, reason) for cell, reason in reasons.items() if reason is not None]
    return [cell for cell in cells if reasons[cell] is None], refused


def baseline_cells(names: Sequence[str], cells: Sequence[Cell], facts: MatrixFacts) -> Iterator[Cell | RefusedCell]:
    """Yield the baselines for these cells; `names` are keys of BASELINES."""
    transport = None if facts.uses_gpus else "gloo"
    for name in names:
        if name == "one":
            yield Cell(name, RunConfig("auto", None, "python"))
        elif name == "hvd":
            library = registry.HOROVOD_LIBRARY
            configs = [each.config for each in cells if registry.uses_library(each.config.backend, library)]
            if configs:
                yield Cell(name, configs[0])
            else:
                cell = Cell(name, RunConfig("horovod", None, "torchrun"))
                yield RefusedCell(cell, "it needs a cell of the backend horovod that can run")
        else:
            yield Cell(name, RunConfig("native", transport, "torchrun"))
