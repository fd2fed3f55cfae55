"""Fingerprints: equal for equal bits, and different if any bit differs."""

import hashlib
import math

import pytest
import torch

from dualdist.collectives.consistency import CHUNK_WORDS, digest, fingerprints

DTYPES = (torch.bool, torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64)


def one(tensor: torch.Tensor) -> bytes:
    return fingerprints([tensor])[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 3, 7, CHUNK_WORDS - 1, CHUNK_WORDS, 2 * CHUNK_WORDS + 5])
def test_every_bit_counts_and_nothing_else(dtype: torch.dtype, count: int) -> None:
    tensor = torch.arange(count).remainder(2).to(dtype)
    before = one(tensor)
    assert one(tensor.clone()) == before
    assert one(torch.cat([tensor, tensor])[count:]) == before, "wherever it lies"
    assert one(torch.stack([tensor, tensor], 1)[:, 0]) == before, "with gaps in between"
    data = tensor.view(torch.uint8)
    for place in {0, len(data) // 2, len(data) - 1}:
        for bit in (0, 7):
            data[place] ^= 1 << bit
            assert one(tensor) != before, (place, bit)
            data[place] ^= 1 << bit
    assert one(tensor) == before


def test_length_order_conjugates_and_nan_count() -> None:
    x = torch.tensor([1.0, 2.0, 0.0])
    assert (
        len({one(x), one(x[:2]), one(x.flip(0)), one(torch.tensor([])), one(torch.zeros(1)), one(torch.zeros(2))}) == 6
    )
    assert digest([x, x[:2]]) != digest([x[:2], x])
    assert digest([]) == digest([])
    z = torch.tensor([1 + 2j, 3 - 1j])
    assert one(z.conj()) == one(z.conj().resolve_conj()) != one(z)
    nan = torch.tensor([math.nan])
    assert one(nan) == one(nan.clone())
    other = nan.clone()
    other.view(torch.int32).add_(1)
    assert other.isnan().all()
    assert one(other) != one(nan)


def test_the_fingerprint_is_the_documented_hash() -> None:
    """Computed with Python integers, without torch: so it is the same on every machine and device."""
    count = CHUNK_WORDS + 3
    tensor = torch.arange(count, dtype=torch.int32) * 12345 - 7
    stream = hashlib.shake_256(b"dualdist").digest(8 * CHUNK_WORDS)
    factors = [int.from_bytes(stream[n : n + 8], "little", signed=True) for n in range(0, len(stream), 8)]
    words = tensor.tolist()
    sums = [
        sum(factor * word for factor, word in zip(factors, words[start : start + CHUNK_WORDS], strict=False))
        for start in (0, CHUNK_WORDS)
    ]
    said = (4 * count).to_bytes(8, "little") + b"".join((each % 2**64).to_bytes(8, "little") for each in sums)
    assert one(tensor) == hashlib.sha256(said).digest()[:16]
