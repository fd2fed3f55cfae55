"""What stands for all bits of a tensor, found where it lies, so that a model on a GPU need not leave it.

Each chunk of 32-bit words becomes the sum of them times as many random numbers, modulo 2**64 (multilinear hashing;
Lemire and Kaser, "Strongly universal string hashing is fast", The Computer Journal 57, 2014): two chunks that differ
have the same sum with a chance of 2**-32 at most. That is meant for accidents, not for somebody who looks for a pair.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence

import torch

from dualdist.backends.control_plane import as_bytes

WORD_BYTES = 4
CHUNK_WORDS = 1 << 16  # with their products they stay in a processor's second cache
# Chunks at a time: on a GPU every call costs more than its work.
CHUNKS_ON_CPU, CHUNKS_ELSEWHERE = 1, 64
DIGEST_BYTES = 16


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Stands for all their bits, in this order."""
    return hashlib.sha256(b"".join(fingerprints(list(tensors)))).hexdigest()


@torch.no_grad()
def fingerprints(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Of each tensor DIGEST_BYTES, which are the same where the bits are, on whatever device. Waits once a device."""
    found: list[bytes] = [b""] * len(tensors)
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        mine = [number for number, tensor in enumerate(tensors) if tensor.device == device]
        chunks = ChunkHasher(device)
        sums = [chunks.sums(tensors[number].detach().resolve_conj().resolve_neg().contiguous()) for number in mine]
        together = torch.cat(sums).cpu()
        for number, own in zip(mine, together.split(list(map(len, sums))), strict=True):
            # Zeros at the end add nothing to a sum.
            said = tensors[number].nbytes.to_bytes(8, "little") + own.numpy().tobytes()
            found[number] = hashlib.sha256(said).digest()[:DIGEST_BYTES]
    return found


class ChunkHasher:
    """Adds up the chunks of one tensor after the other, in the same memory."""

    def __init__(self, device: torch.device) -> None:
        self._step = CHUNKS_ON_CPU if device.type == "cpu" else CHUNKS_ELSEWHERE
        self._factors = _factors(device)
        self._products = torch.empty(self._step, CHUNK_WORDS, dtype=torch.int64, device=device)

    def sums(self, tensor: torch.Tensor) -> torch.Tensor:
        """One number for each chunk of a contiguous tensor."""
        words = _words(as_bytes(tensor))
        whole = len(words) // CHUNK_WORDS
        rows, rest = words[: whole * CHUNK_WORDS].view(whole, CHUNK_WORDS), words[whole * CHUNK_WORDS :]
        pieces = [*(rows.split(self._step) if whole else ()), *([rest.view(1, -1)] if len(rest) else [])]
        return torch.cat([self._sum(piece) for piece in pieces] or [words.new_empty(0, dtype=torch.int64)])

    def _sum(self, rows: torch.Tensor) -> torch.Tensor:
        width = rows.shape[1]
        products = self._products[: len(rows), :width]
        return torch.mul(rows, self._factors[:width], out=products).sum(1)


def _words(data: torch.Tensor) -> torch.Tensor:
    """Bytes as words; torch views them in place only where they lie as words do."""
    missing = -len(data) % WORD_BYTES
    if missing or data.storage_offset() % WORD_BYTES:
        data = torch.cat([data, data.new_zeros(missing)])
    return data.view(torch.int32)


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """The same random numbers everywhere, also where another version of torch runs."""
    stream = hashlib.shake_256(b"dualdist").digest(8 * CHUNK_WORDS)
    return torch.frombuffer(bytearray(stream), dtype=torch.int64).to(device)
