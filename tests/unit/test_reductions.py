"""What a reduction over many ranks makes of the sum, without the ranks."""

from __future__ import annotations

import pytest
import torch

from dualdist.errors import UsageError
from dualdist.reductions import check_op, settle_

SIZES = range(1, 2000)


def test_the_integer_mean_of_ones_is_one_for_any_number_of_ranks() -> None:
    """49 times 1/49 is a little less than 1 in float64."""
    assert all(settle_(torch.tensor(size), "integer mean", size, 1.0).item() == 1 for size in SIZES)
    assert any(int(size * (1 / size)) == 0 for size in SIZES), "else this shows nothing"


@pytest.mark.parametrize(("total", "postscale", "expected"), [(7, 1.0, 3), (-7, 1.0, -3), (7, 2.0, 7), (-3, 0.5, 0)])
def test_the_integer_mean_is_cut_off_once(total: int, postscale: float, expected: int) -> None:
    assert settle_(torch.tensor(total), "integer mean", 2, postscale).item() == expected


def test_only_integers_have_an_integer_mean_and_only_the_face_speaks_of_it() -> None:
    check_op("integer mean", torch.uint16)
    for op in ("integer mean", "middle"):
        with pytest.raises(UsageError) as refused:
            check_op(op, torch.float32)
        assert str(refused.value).endswith("expected one of mean, sum, min, max, product, adasum")
