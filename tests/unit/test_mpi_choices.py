"""What the backend mpi decides without MPI."""

from __future__ import annotations

import pytest
import torch

from dualdist.backends.mpi import backend
from dualdist.backends.mpi.backend import WAIT_BUDGET_S, split_calls, wait_budget_s


@pytest.mark.parametrize(
    ("cores", "everywhere", "local_size", "threads", "expected"),
    [
        pytest.param(2, 2, 2, 1, WAIT_BUDGET_S, id="as many ranks as cores"),
        pytest.param(2, 2, 4, 1, WAIT_BUDGET_S, id="more ranks than cores"),
        pytest.param(64, 64, 4, 16, WAIT_BUDGET_S, id="torch takes all cores of a rank"),
        pytest.param(64, 64, 4, 15, 0.0, id="torch leaves a core"),
        pytest.param(1, 64, 64, 1, WAIT_BUDGET_S, id="bound to a core"),
        pytest.param(8, 64, 8, 7, 0.0, id="bound to eight, torch leaves one"),
        pytest.param(64, 64, 1, 64, WAIT_BUDGET_S, id="one rank, all cores"),
    ],
)
def test_a_program_waits_for_the_thread_unless_it_has_a_core(
    cores: int, everywhere: int, local_size: int, threads: int, expected: float
) -> None:
    assert wait_budget_s(cores, everywhere, local_size, threads) == expected


@pytest.mark.parametrize("count", [0, 1, 24, 25, 26, 1000])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex128])
def test_pieces_are_countable_and_together_the_tensor(
    monkeypatch: pytest.MonkeyPatch, count: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(backend, "MAX_COUNT", 101)
    tensor = torch.arange(count).to(dtype).view(-1, 1)
    pieces = split_calls(tensor)
    assert all(0 < piece.nbytes <= 101 for piece in pieces)
    assert torch.equal(torch.cat([tensor.new_empty(0), *(piece.view(-1) for piece in pieces)]), tensor.view(-1))
    assert all(piece.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for piece in pieces)
