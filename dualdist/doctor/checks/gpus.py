"""GPUs and ranks: how many of both, and who sees which."""

from __future__ import annotations

from collections.abc import Iterator

from dualdist.doctor.context import DoctorContext
from dualdist.doctor.findings import Finding
from dualdist.doctor.host import HIDING, VISIBLE
from dualdist.utils.package_probe import TorchProbe

# These can show each task GPUs of its own; the others' ranks inherit what is visible, and see the same.
SHOWING = ("srun", "jsrun", "flux", "mpiexec")


def find(case: DoctorContext) -> Iterator[Finding]:
    """Whether the ranks of this host find GPUs of their own."""
    visible = case.environ.get(VISIBLE)
    if case.facts.host.gpus and visible in HIDING:
        yield Finding(
            "gpus-hidden",
            "info",
            f"{VISIBLE}={visible}: this host has {case.facts.host.gpus} GPU(s), and none may be used",
            "everything runs on the CPUs",
            f"unset {VISIBLE}, if that was not meant",
        )
    said = case.facts.torch
    gpus = said.gpus if isinstance(said, TorchProbe) else 0
    if not gpus or case.ranks <= 1 or not (case.is_started or case.is_asked):
        return
    # The driver lists GPUs that a task may not use, too: where there are fewer than ranks, nobody has one alone.
    is_hidden = gpus == 1 and case.launcher in SHOWING and not 0 < case.facts.host.gpus < case.ranks
    if is_hidden:
        yield Finding(
            "gpus-hidden-per-task",
            "info",
            f"{case.ranks} ranks are on this host, and this one sees one GPU" + (f" ({visible})" if visible else ""),
            "each task has a GPU of its own, which is number 0 for all: torch.device('cuda', local_rank) would fail",
            "use dd.device(), which knows; where NCCL is slow within a host, show every task all GPUs (--gpus-per-node "
            "without --gpus-per-task), as it cannot copy between GPUs that it does not see",
        )
    elif case.ranks > gpus:
        yield Finding(
            "more-ranks-than-gpus",
            "error" if case.is_started else "warning",
            f"{case.ranks} ranks on this host, and torch sees {gpus} GPU(s)",
            "NCCL refuses two ranks on one GPU (`Duplicate GPU detected`)",
            f"start {gpus} rank(s) on this host, or hide the GPUs to train on the CPUs: {VISIBLE}=",
        )
