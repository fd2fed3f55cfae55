"""From which variable each part of the topology came, which were ignored and why, and which backend follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dualdist.backends.availability import Availability
from dualdist.environments.env_values import RENDEZVOUS, get_value
from dualdist.environments.unused import UnusedVariable, find_all_set, find_unused
from dualdist.errors import TopologyError, UsageError
from dualdist.rendezvous.backend_selection import (
    BACKEND,
    BACKENDS,
    HOROVOD_CONTROLLER,
    HOROVOD_LAUNCHERS,
    MPI_LAUNCHERS,
    TRANSPORT,
    TRANSPORTS,
    backend_under_mpi,
    check_choice,
)
from dualdist.rendezvous.saved_choice import choices_path, is_applicable
from dualdist.topology import Topology

MEETINGS = {
    "none": "there is nobody to meet",
    "address": "rank 0 listens there",
    "agent": "the launcher's agent serves a store there",
    "horovod": "at the store of horovodrun",
    "mpi": "by one MPI broadcast",
    "slurm": "by a file in the folder from which the job was submitted",
}


@dataclass(frozen=True)
class ExplainedField:
    """One part of the place, and where its value came from."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class TopologyExplanation:
    """All parts and what did not count. `error` where the variables are broken: without a place there are no parts."""

    parts: tuple[ExplainedField, ...]
    ignored: tuple[UnusedVariable, ...]
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def explain(
    environ: Mapping[str, str],
    found: Topology | TopologyError,
    backends: Mapping[str, Availability],
    *,
    has_gpu: bool,
) -> TopologyExplanation:
    """What the variables said, and what follows from it."""
    if isinstance(found, TopologyError):
        seen = tuple(
            UnusedVariable(name, get_value(environ, name) or "", "see the error") for name in find_all_set(environ)
        )
        return TopologyExplanation((), seen, str(found))
    parts = [
        ExplainedField("launcher", found.launcher, found.source),
        *_numbers(environ, found),
        _meeting(environ, found),
    ]
    wrong = wrong_choices(environ)
    if not wrong:
        chosen, why = backend_of(environ, found, backends, has_gpu=has_gpu)
        asked = get_value(environ, TRANSPORT)
        parts += [
            ExplainedField("backend", chosen, why),
            ExplainedField(
                "transport", asked or "the backend's own", TRANSPORT if asked else f"{TRANSPORT} is not set"
            ),
        ]
    return TopologyExplanation(tuple(parts), tuple(find_unused(environ, found)), "; ".join(wrong))


def wrong_choices(environ: Mapping[str, str]) -> list[str]:
    """Of the two variables that choose, those whose values mean nothing, in the words of dd.init()."""
    found = []
    for variable, choices, what in ((BACKEND, BACKENDS, "backend"), (TRANSPORT, TRANSPORTS, "transport")):
        try:
            check_choice(get_value(environ, variable) or choices[0], choices, what, variable)
        except UsageError as error:
            found.append(str(error))
    return found


def _numbers(environ: Mapping[str, str], found: Topology) -> Iterator[ExplainedField]:
    origins = dict(found.origins)
    for name in ("rank", "size", "local_rank", "local_size", "node_rank", "num_nodes"):
        if name in origins:
            source = f"{origins[name]} ({get_value(environ, origins[name].partition('[')[0])})"
        elif name in found.inferred:
            source = "inferred by the usual placement; the ranks find out when they meet"
        else:
            source = "follows from the others" if found.size > 1 else "a job of one rank"
        yield ExplainedField(name, str(getattr(found, name)), source)


def _meeting(environ: Mapping[str, str], found: Topology) -> ExplainedField:
    named = get_value(environ, RENDEZVOUS)
    if named is not None and found.size > 1:
        return ExplainedField("ranks meet", named, RENDEZVOUS)
    if found.address is None or found.size == 1:
        return ExplainedField("ranks meet", found.rendezvous, MEETINGS[found.rendezvous])
    names = dict(found.origins)
    source = f"{names.get('address')} and {names.get('port')}; {MEETINGS[found.rendezvous]}"
    return ExplainedField("ranks meet", f"{found.address} port {found.port}", source)


def backend_of(
    environ: Mapping[str, str], found: Topology, backends: Mapping[str, Availability], *, has_gpu: bool
) -> tuple[str, str]:
    """The backend that dd.init() would take for this place, and why: as rendezvous.backend_selection decides."""
    asked = get_value(environ, BACKEND)
    if asked not in (None, "auto"):
        return asked or "", BACKEND
    name, why = _by_launcher(found, backends, has_gpu=has_gpu)
    saved = choices_path(environ)
    if is_applicable(found) and saved.is_file():
        why += f"; a choice of dualdist compare for such a job goes before it ({saved})"
    controller = get_value(environ, HOROVOD_CONTROLLER)
    if name == "horovod" and controller is not None:
        why += f"; {HOROVOD_CONTROLLER}={controller}"
    return name, why


def _by_launcher(found: Topology, backends: Mapping[str, Availability], *, has_gpu: bool) -> tuple[str, str]:
    launcher = found.launcher
    if launcher in HOROVOD_LAUNCHERS:
        return "horovod", "horovodrun is Horovod's own launcher"
    if launcher in MPI_LAUNCHERS:
        has_horovod = backends["horovod"].version is not None and backends["horovod"].mpi is not False
        name = backend_under_mpi(has_horovod, backends["mpi"].version is not None, has_gpu=has_gpu)
        why = {
            "horovod": "the installed Horovod was built with MPI",
            "mpi": "there is no Horovod with MPI, and mpi4py is installed",
            "native": "torch sees GPUs, and NCCL reaches them"
            if has_gpu
            else "neither a Horovod with MPI nor mpi4py is installed",
        }
        return name, f"{launcher} started MPI, and {why[name]}"
    if launcher == "none":
        return "single", "no launcher started this process"
    return "native", f"{launcher} starts ranks for any backend, and native needs nothing but torch"
