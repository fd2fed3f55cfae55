"""How ranks go on in the same process when others are lost or come: they leave the job, and all there are meet anew.

Only horovodrun's elastic driver keeps ranks when another one is lost; all others end the job, or start it again.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping

from dualdist import session
from dualdist.backends.horovod.driver import is_elastic, watch_hosts
from dualdist.errors import CollectiveError, DualdistError, RendezvousError

# How often the ranks try to meet: one that was started for the meeting may be lost, too.
TRIES = 3


@contextlib.contextmanager
def notify_host_changes(environ: Mapping[str, str], changed: Callable[[str], None]) -> Iterator[None]:
    """In the block changed(words) is called, in a thread, when hosts come or go, where the launcher tells."""
    if not is_elastic(environ):
        yield
        return
    end = watch_hosts(environ, lambda timestamp, how: changed("hosts came or went"))
    try:
        yield
    finally:
        end()


def reinitialize(why: str) -> None:
    """This rank is in a new session, with all ranks that there are now; every rank that is left calls this."""
    here = session.current()
    backend, timeout_s = here.backend.name, here.timeout_s
    print_on_rank_0(f"{why}; the ranks that are left meet anew")
    for attempt in range(TRIES):
        with contextlib.suppress(DualdistError):  # nobody may be there to take leave of
            if session.is_open():
                session.shutdown()
        try:
            session.init(None if backend == "single" else backend, timeout_s=timeout_s)
            break
        except (CollectiveError, RendezvousError):
            if attempt == TRIES - 1:
                raise
    print_on_rank_0(f"{session.current().topology.size} ranks go on")


def print_on_rank_0(words: str) -> None:
    """The first rank says so."""
    if session.current().topology.rank == 0:
        print(f"dualdist: {words}", file=sys.stderr, flush=True)
