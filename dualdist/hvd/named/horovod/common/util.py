"""`horovod.common.util` under the alias: what programs ask it, answered by the face."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.torch_version import TorchVersion

from dualdist import hvd
from dualdist.utils.temporary_env import temporary_variables

EXTENSIONS = ["torch"]


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether there is a face for this framework: "torch" alone."""
    return ext_base_name in EXTENSIONS


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """ImportError unless `ext_name` is a face that there is."""
    if not extension_available(ext_name.removeprefix("horovod.")):
        raise ImportError(f"{ext_name}: dualdist has the face horovod.torch only")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether this process has a GPU."""
    return extension_available(ext_base_name) and torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> bool:
    return bool(hvd.mpi_built())


def gloo_built(verbose: bool = False) -> bool:
    return bool(hvd.gloo_built())


def nccl_built(verbose: bool = False) -> int:
    return int(hvd.nccl_built())


def ddl_built(verbose: bool = False) -> bool:
    return bool(hvd.ddl_built())


def ccl_built(verbose: bool = False) -> bool:
    return bool(hvd.ccl_built())


def num_rank_is_power_2(num_rank: int) -> bool:
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(l: Sequence[Any], n: int) -> list[Sequence[Any]]:  # noqa: E741 (the name is part of the interface)
    """n slices of nearly the same length, in order; the first ones take what is over."""
    each, over = divmod(len(l), n)
    starts = [part * each + min(part, over) for part in range(n + 1)]
    return [l[start:end] for start, end in itertools.pairwise(starts)]


def is_iterable(x: object) -> bool:
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether a version "major.minor.patch" is the target or later."""
    if not isinstance(ver, str) or not isinstance(target, str) or target.count(".") != 2:
        raise ValueError(f"versions {ver!r} and {target!r}: expected texts, the second one major.minor.patch")
    return bool(TorchVersion(ver) >= target)


def env(**kwargs: str | None) -> AbstractContextManager[None]:
    """For the block, these environment variables are set; those given as None stay as they are."""
    return temporary_variables(os.environ, {name: value for name, value in kwargs.items() if value is not None})


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """The function by which `op` and the older `average` become one; `reduce_ops` does not matter."""
    return hvd.mpi_ops.handle_average_backwards_compatibility
