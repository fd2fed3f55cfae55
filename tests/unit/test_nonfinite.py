"""Detection of NaN and infinite gradients in every dtype and size, and its error messages."""

import math

import pytest
import torch

from dualdist.ddp.nonfinite import INFINITE, NAN, find_suspects, format_nonfinite, nonfinite_kinds

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], 0),
        ([0.0, 1.0, -2.0], 0),
        ([60000.0, 60000.0, 60000.0], 0),
        ([1.0, math.nan], NAN),
        ([math.inf, 1.0], INFINITE),
        ([-math.inf, math.inf], INFINITE),
        ([math.inf, math.nan, -math.inf], NAN | INFINITE),
    ],
)
def test_nan_and_infinity_are_distinguished(dtype: torch.dtype, values: list[float], expected: int) -> None:
    grad = torch.tensor(values, dtype=dtype)
    assert nonfinite_kinds(grad) == expected
    assert nonfinite_kinds(grad.view(-1, 1)) == expected
    assert nonfinite_kinds(grad.to_sparse()) == expected
    assert find_suspects([grad, torch.ones(3, dtype=dtype)])[1] is False
    assert find_suspects([grad])[0] or not expected, "what is not finite is suspected"


def test_finite_values_whose_sum_overflows_are_finite() -> None:
    large = torch.full((4,), 3e38)
    assert find_suspects([large]) == [True]
    assert [nonfinite_kinds(grad) for grad in (large, None, torch.tensor([1, 2]))] == [0, 0, 0]


def test_errors_name_the_first_gradients_and_the_ranks_that_caused_them() -> None:
    blame = {
        "a": [0, NAN, 0, NAN],
        "b": [INFINITE, 0, NAN | INFINITE, 0],
        "c": [0, 0, 0, 0],
        **{name: [] for name in "defg"},
    }
    expected = (
        "a (NaN on ranks 1, 5), b (infinite on rank 0, NaN and infinite on rank 3), "
        "c (finite on every rank, but not their sum), d, e and 2 more"
    )
    assert format_nonfinite(blame, [0, 1, 3, 5]) == expected
