"""`DUALDIST_TORCH_BACKEND`: another backend of torch.distributed for programs that name theirs in the script.

Public functions of torch are replaced by ones of the same signature, in torch's modules that hold them, before the
program can import them: torch loads this package at the end of its own import.
"""

import functools
import inspect
import sys
from typing import Any

import torch.distributed as dist

from dualdist import session
from dualdist.errors import UsageError
from dualdist.utils import accelerator
from dualdist.utils.suggest import did_you_mean
from dualdist.utils.variables import TORCH_BACKEND

# MPI numbers its ranks and connects them: torch ignores these arguments then, and programs pass zeros.
IGNORED_BY_MPI = ("rank", "world_size", "init_method", "store")


def is_replaced(asked: str | None, *, has_gpu: bool) -> bool:
    """Return True if another backend is taken in place of the one that a program asked for.

    None, and a form such as "cpu:gloo,cuda:nccl", ask for a backend for each kind of device: with a GPU both are left
    alone, as a backend in Python takes the place of all.
    """
    name = (asked or "cpu:gloo").lower()
    if ":" in name:
        return not has_gpu and bool({"cpu:gloo", "cpu:mpi"}.intersection(name.split(",")))
    return name in ("gloo", "mpi") or (name == "nccl" and not has_gpu)


class TorchBackend:
    """The backend `name`, given to programs that ask for another, and what this program asked for, if it was replaced.

    get_backend() answers "gloo" or "mpi" to a program that asked for it: ignite, for one, wraps a model in DDP on the
    backends that it knows, and does nothing on others.
    """

    def __init__(self, name: str) -> None:
        self.name = name.lower()
        self._asked = ""
        self._start, self._get_backend, self._new_group = dist.init_process_group, dist.get_backend, dist.new_group
        self._signature, self._group_signature = inspect.signature(self._start), inspect.signature(self._new_group)

    def install(self) -> None:
        """Replace the functions."""

        @functools.wraps(self._start)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            # dualdist's own groups, and those that it is measured against, are what they are.
            is_own = sys._getframe(1).f_globals.get("__name__", "").startswith("dualdist.")
            given = self._signature.bind(*args, **kwargs).arguments
            self._start(**(given if is_own else self._replace(given)))

        @functools.wraps(self._get_backend)
        def get_backend(*args: Any, **kwargs: Any) -> Any:
            found = self._get_backend(*args, **kwargs)
            return dist.Backend(self._asked) if self._asked and found == self.name else found

        @functools.wraps(self._new_group)
        def new_group(*args: Any, **kwargs: Any) -> Any:
            given = self._group_signature.bind(*args, **kwargs).arguments
            asked = given.get("backend")
            if self._asked and asked and is_replaced(asked, has_gpu=accelerator.kind() is not None):
                given["backend"] = self.name  # as get_backend() has answered, or as the script says for all its groups
            return self._new_group(**given)

        for module in (dist, dist.distributed_c10d, dist.device_mesh):
            module.init_process_group = init_process_group  # type: ignore[attr-defined]
        dist.get_backend = get_backend
        dist.new_group = new_group

    def _replace(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of init_process_group() with the backend that is taken."""
        asked, self._asked = given.get("backend"), ""
        name = (asked or "").lower()
        has_gpu = accelerator.kind() is not None
        if not is_replaced(asked, has_gpu=has_gpu):
            if has_gpu and (not asked or name == "nccl" or ":" in name):
                _say_once(given, f"init_process_group({_shown(asked)}) stays as it is, since torch sees a GPU")
            return given
        if self.name not in dist.Backend.backend_list:
            known = [each for each in dist.Backend.backend_list if each != dist.Backend.UNDEFINED]
            raise UsageError(
                f"{TORCH_BACKEND}={self.name}: expected a backend of torch.distributed, one of {', '.join(known)}"
                f"{did_you_mean(self.name, known)}; DUALDIST_BACKEND chooses what moves the tensors of dualdist"
            )
        dropped = ("device_id", *(IGNORED_BY_MPI if name == "mpi" else ()))  # device_id is a GPU, for NCCL
        given = {key: value for key, value in given.items() if key not in dropped}
        if name != self.name:
            _say_once(given, f"init_process_group({_shown(asked)}) takes the backend {self.name} ({TORCH_BACKEND})")
        self._asked = name if name in ("gloo", "mpi") else ""
        return {**given, "backend": self.name}


def _shown(asked: str | None) -> str:
    return f'"{asked}"' if asked else ""


def _say_once(given: dict[str, Any], line: str) -> None:
    """Print the line on rank 0."""
    rank = given.get("rank", -1)
    if (rank if rank >= 0 else session.rank_and_size()[0]) == 0:
        _print_once(line)


@functools.cache
def _print_once(line: str) -> None:
    print(f"dualdist: {line}", file=sys.stderr, flush=True)
