"""Horovod's compressors, which make tensors smaller on the wire (horovod.torch.compression)."""

from typing import Any

import torch

from dualdist.ddp.compression import CASTS


class Compressor:
    """The interface of a compressor; subclass it for another one."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and a context for decompress()."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the result in the form of the original tensor."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Sends floating point tensors in 16 bits."""

    compress = staticmethod(CASTS["fp16"].compress)
    decompress = staticmethod(CASTS["fp16"].decompress)


class HorovodCompression:
    """The available compressors; a program calls it hvd.Compression."""

    none = NoneCompressor
    fp16 = FP16Compressor


Compression = HorovodCompression
