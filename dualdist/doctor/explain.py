"""The variable behind each topology field, the ignored variables with reasons, and the resulting backend."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dualdist.backends import registry
from dualdist.backends.horovod import CONTROLLER
from dualdist.backends.registry import Availability
from dualdist.environments import UnusedVariable, find_all_set, find_unused
from dualdist.environments.env_values import RENDEZVOUS, get_value
from dualdist.errors import TopologyError, UsageError
from dualdist.launch.exec_env import topology_variables
from dualdist.rendezvous.backend_selection import (
    BACKEND,
    TRANSPORT,
    check_choice,
    default_backend,
)
from dualdist.topology import Topology
from dualdist.utils.saved_choices import choices_path, is_applicable

RENDEZVOUS_METHODS = {
    "none": "a single rank needs no rendezvous",
    "address": "rank 0 listens there",
    "agent": "the launcher's agent serves a store there",
    "horovod": "in horovodrun's store",
    "mpi": "by an MPI broadcast",
    "slurm": "by a file in the folder from which the job was submitted",
    "spawn": "by a file of the program that started the ranks",
}


@dataclass(frozen=True)
class ExplainedField:
    """A topology field, its value, and where the value came from."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class TopologyExplanation:
    """All fields, none for invalid variables; the ignored variables; and those that `dualdist exec` gives a program."""

    fields: tuple[ExplainedField, ...]
    ignored: tuple[UnusedVariable, ...]
    error: str = ""
    exec_sets: Mapping[str, str] = field(default_factory=dict)


def explain(
    environ: Mapping[str, str],
    detected: Topology | TopologyError,
    backends: Mapping[str, Availability],
    *,
    has_gpu: bool,
) -> TopologyExplanation:
    """Return the source of each topology field, and of the backend that follows from them."""
    if isinstance(detected, TopologyError):
        names = find_all_set(environ)
        ignored = (UnusedVariable(name, get_value(environ, name) or "", "see the error") for name in names)
        return TopologyExplanation((), tuple(ignored), str(detected))
    fields = [
        ExplainedField("launcher", detected.launcher, detected.source),
        *_explain_ranks(environ, detected),
        _explain_rendezvous(environ, detected),
    ]
    invalid = invalid_choices(environ)
    if not invalid:
        fields.append(ExplainedField("backend", *explain_backend(environ, detected, backends, has_gpu=has_gpu)))
        transport = get_value(environ, TRANSPORT)
        source = TRANSPORT if transport else f"{TRANSPORT} is not set"
        fields.append(ExplainedField("transport", transport or "the backend's default", source))
    unused = tuple(find_unused(environ, detected))
    return TopologyExplanation(tuple(fields), unused, "; ".join(invalid), topology_variables(detected))


def invalid_choices(environ: Mapping[str, str]) -> list[str]:
    """Return dd.init()'s errors for DUALDIST_BACKEND and DUALDIST_TRANSPORT."""
    errors = []
    for variable, choices, what in (
        (BACKEND, registry.choices(), "backend"),
        (TRANSPORT, registry.transports(), "transport"),
    ):
        try:
            check_choice(get_value(environ, variable) or choices[0], choices, what, variable)
        except UsageError as error:
            errors.append(str(error))
    return errors


def _explain_ranks(environ: Mapping[str, str], topology: Topology) -> Iterator[ExplainedField]:
    origins = dict(topology.origins)
    for name in ("rank", "size", "local_rank", "local_size", "node_rank", "num_nodes"):
        if name in origins:
            source = f"{origins[name]} ({get_value(environ, origins[name].partition('[')[0])})"
        elif name in topology.inferred:
            source = "inferred from the usual placement; corrected at rendezvous"
        else:
            source = "derived from the other fields" if topology.size > 1 else "a 1-rank job"
        yield ExplainedField(name, str(getattr(topology, name)), source)


def _explain_rendezvous(environ: Mapping[str, str], topology: Topology) -> ExplainedField:
    requested, method = get_value(environ, RENDEZVOUS), RENDEZVOUS_METHODS[topology.rendezvous]
    if requested is not None and topology.size > 1:
        return ExplainedField("rendezvous", requested, RENDEZVOUS)
    if topology.address is None or topology.size == 1:
        return ExplainedField("rendezvous", topology.rendezvous, method)
    origins = dict(topology.origins)
    source = f"{origins.get('address')} and {origins.get('port')}; {method}"
    return ExplainedField("rendezvous", f"{topology.address} port {topology.port}", source)


def explain_backend(
    environ: Mapping[str, str], topology: Topology, backends: Mapping[str, Availability], *, has_gpu: bool
) -> tuple[str, str]:
    """Return the backend that dd.init() would choose, and why."""
    requested, horovod = get_value(environ, BACKEND), backends["horovod"]
    if requested not in (None, "auto"):
        return requested or "", BACKEND
    has_horovod = horovod.version is not None and horovod.mpi is not False
    has_mpi4py = backends["mpi"].version is not None
    name, why = default_backend(topology.launcher, lambda: (has_horovod, has_mpi4py, has_gpu))
    saved, controller = choices_path(environ), get_value(environ, CONTROLLER)
    if is_applicable(topology) and saved.is_file():
        why += f"; a choice that dualdist compare saved for such a job takes precedence ({saved})"
    if name == "horovod" and controller is not None:
        why += f"; {CONTROLLER}={controller}"
    return name, why
