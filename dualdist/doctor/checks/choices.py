"""What was asked for: a backend and a transport that there are and go together, and a trace that can be written."""

from __future__ import annotations

from collections.abc import Iterator

from dualdist.diagnostics.trace_format import TIMELINE
from dualdist.doctor.context import DoctorContext
from dualdist.doctor.explain import backend_of, wrong_choices
from dualdist.doctor.findings import Finding
from dualdist.environments.env_values import get_value
from dualdist.launch.job import JobChoices, find_conflicts
from dualdist.rendezvous.backend_selection import HOROVOD_CONTROLLER, TRANSPORT
from dualdist.topology import Topology
from dualdist.utils.package_probe import TorchProbe

RAISED = "dd.init() refuses it on every rank"


def find(case: DoctorContext) -> Iterator[Finding]:
    """What is wrong with the choice of a backend and a transport."""
    if case.facts.timeline_problem:
        yield Finding(
            "timeline-unwritable",
            "error",
            f"{TIMELINE}={get_value(case.environ, TIMELINE)}: {case.facts.timeline_problem}",
            f"rank 0 writes it, and where it cannot {RAISED}",
            f"name a file in a folder that is there and may be written, or unset {TIMELINE}",
        )
    wrong = wrong_choices(case.environ)
    for problem in wrong:
        yield Finding("choice-unknown", "error", problem, RAISED, "name one of these, or unset the variable")
    if not wrong and case.topology is not None:
        yield from _of_pair(case, case.topology)


def _of_pair(case: DoctorContext, topology: Topology) -> Iterator[Finding]:
    """The transport, for the backend that this process would get."""
    said = case.facts.torch
    gpus = said.gpus if isinstance(said, TorchProbe) else 0
    backend, _ = backend_of(case.environ, topology, case.backends, has_gpu=gpus > 0)
    variable = TRANSPORT if get_value(case.environ, TRANSPORT) or backend != "horovod" else HOROVOD_CONTROLLER
    transport = (get_value(case.environ, variable) or "").lower()
    if not transport or backend == "single":
        return
    wrong = [each.message for each in find_conflicts(JobChoices(None, backend, transport), horovod_has_mpi=None)]
    if (backend, transport) == ("horovod", "mpi") and topology.size > 1 and not topology.mpi:
        wrong.append(f"MPI was not started by {topology.launcher}")
    if transport == "nccl" and isinstance(said, TorchProbe) and not gpus:
        wrong.append("nccl moves GPU tensors, and torch sees no GPU here")
    for problem in wrong:
        yield Finding(
            "transport-impossible",
            "error",
            f"{variable}={transport}, and this process would get the backend {backend}: {problem}",
            RAISED,
            f"unset {variable}, or choose a backend and a launcher that have it",
        )
