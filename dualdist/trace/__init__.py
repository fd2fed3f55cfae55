"""Traces of a running job, which variables ask for: a timeline of all ranks, and a table of slow ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dualdist.session import SentGradients, SessionObserver
from dualdist.utils.variables import TIMELINE

if TYPE_CHECKING:
    import torch

    from dualdist.collectives.group import Group
    from dualdist.session import Session
    from dualdist.trace.timeline import TimelineWriter

# If set, rank 0 prints a table of slow ranks at the end.
SLOW_RANKS = "DUALDIST_SLOW_RANKS"


class _AskedByVariables(SessionObserver):
    """Traces each session for which the variables ask for it when it opens."""

    def __init__(self) -> None:
        self._timeline: TimelineWriter | None = None
        self._sessions = 0

    def opened(self, session: Session, environ: Mapping[str, str]) -> None:
        self._timeline = None
        if path := environ.get(TIMELINE):
            from dualdist.trace.timeline import start_timeline

            backend = session.backend
            about = f"{backend.name} over {backend.transport}, {session.topology.launcher}"
            self._timeline = start_timeline(path, session.world, self._sessions, about)
            session.close_callbacks.append(self._timeline.finish)
        self._sessions += 1
        if environ.get(SLOW_RANKS, "0") not in ("", "0"):
            from dualdist.trace.stragglers import report_at_shutdown

            session.close_callbacks.append(report_at_shutdown(session.world))

    def group_created(self, session: Session, group: Group) -> None:
        if self._timeline is not None:
            self._timeline.listener.observe(group)

    def optimizer_wrapped(self, session: Session, optimizer: torch.optim.Optimizer, gradients: SentGradients) -> None:
        if self._timeline is not None:
            self._timeline.listener.attach(optimizer)


ASKED_BY_VARIABLES = _AskedByVariables()
