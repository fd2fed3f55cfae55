"""Operations of a process group: what a program sees after Ctrl-C broke a wait off."""

from contextlib import nullcontext

import pytest
import torch

from dualdist.c10d.work import GroupWork, Progress
from dualdist.errors import CollectiveError


class Interrupted:
    """An operation of a transport during which the user presses Ctrl-C."""

    def wait(self) -> torch.Tensor:
        raise KeyboardInterrupt

    def done(self) -> bool:
        return False


def test_a_wait_that_was_broken_off_fails_when_it_is_repeated() -> None:
    progress = Progress(0.0)
    work = GroupWork(progress, [Interrupted()], [], nullcontext)
    progress.add(work, in_background=False)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert work.is_completed()
    with pytest.raises(CollectiveError, match="interrupted"):
        work.wait()
    with pytest.raises(CollectiveError, match="out of step"):
        progress.require_usable()
