"""Tensors that cannot be sent as they are, in every public function: right values, or an error on every rank.

Each draw is a kind of tensor, a function that gets it, and the ranks that pass it; the others pass a plain tensor of
the same shape and dtype. Either all ranks get what plain tensors would give, or all raise an error of ours that names
the tensor; and then the next collective works.
"""

import itertools
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping

import torch
from contract.oracle import law
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.testing import assert_close

import dualdist as dd
from dualdist import hvd
from dualdist.errors import DualdistError

LAW_DRAWS = 120
ROWS = 4  # of every tensor here: as many ranks as there are at most

Make = Callable[[], torch.Tensor]
Call = Callable[[torch.Tensor, str], object]


def plain() -> torch.Tensor:
    return torch.arange(1.0, 4 * ROWS + 1).view(ROWS, 4)


def square() -> torch.Tensor:
    return torch.eye(ROWS) * 3


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return plain()


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(ROWS, 4)


class OfTwo(torch.Tensor):
    """A tensor made of another one, as a DTensor is."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "OfTwo":
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError(f"{function} of a tensor without memory")


class Named(torch.Tensor):
    """A subclass with memory of its own, as torchvision's images are."""


# REFUSED are those that no function can send; of the others some functions refuse some.
WORKING: Mapping[str, Make] = {
    "plain": plain,
    "transposed": lambda: plain().t().contiguous().t(),
    "strided": lambda: torch.arange(8.0 * ROWS).view(ROWS, 8)[:, ::2],
    "unaligned": lambda: torch.arange(4.0 * ROWS + 1)[1:].view(ROWS, 4),
    "expanded": lambda: torch.arange(4.0).expand(ROWS, 4),
    "windows": lambda: torch.arange(ROWS + 3.0).unfold(0, 4, 1),
    "inference": inference,
    "conj": lambda: torch.complex(plain(), plain() + 1).conj(),
    "neg": lambda: torch.complex(plain(), plain() + 1).conj().imag,
    "0-dim": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 4),
    "no columns": lambda: torch.empty(ROWS, 0),
    "leaf": lambda: plain().requires_grad_(),
    "result": lambda: plain().requires_grad_() * 2,
    "parameter": lambda: nn.Parameter(plain()),
    "subclass": lambda: plain().as_subclass(Named),
    "bfloat16": lambda: plain().bfloat16(),
    "float8": lambda: plain().to(torch.float8_e4m3fn),
    "bool": lambda: plain() > 5,
    "int16": lambda: plain().to(torch.int16),
    "coo": lambda: square().to_sparse(),
    "uncoalesced": lambda: torch.sparse_coo_tensor([[1, 1], [0, 0]], [1.0, 2.0], (ROWS, ROWS)),
    "csr": lambda: square().to_sparse_csr(),
    "bsr": lambda: square().to_sparse_bsr((2, 2)),
}
REFUSED: Mapping[str, Make] = {
    "meta": lambda: torch.ones(ROWS, 4, device="meta"),
    "2**33 elements": lambda: torch.empty(1 << 33, device="meta"),
    "lazy": nn.UninitializedParameter,
    "lazy buffer": nn.parameter.UninitializedBuffer,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(plain(), 0.1, 0, torch.qint8),
    "fake": fake,
    "of others": lambda: OfTwo(plain()),
    "None": lambda: None,  # type: ignore[return-value, dict-item]
    "list": lambda: [1.0],  # type: ignore[return-value, dict-item]
    "dual": plain,  # passed inside of a transformation, as those below
    "grad": plain,
    "vmap": plain,
    "jvp": plain,
}
MAKE = {**WORKING, **REFUSED}
TRANSFORMS = ("dual", "grad", "vmap", "jvp")
SPARSE = ("coo", "uncoalesced", "csr", "bsr")


def under(transform: str, call: Call, tensor: torch.Tensor, name: str) -> object:
    """Call with the tensor inside of a transformation."""
    found: list[object] = []

    def keep(given: torch.Tensor) -> torch.Tensor:
        found.append(call(given, name))
        return given.sum()

    match transform:
        case "dual":
            with forward_ad.dual_level():
                return call(forward_ad.make_dual(tensor, tensor), name)
        case "grad":
            torch.func.grad(keep)(tensor)
        case "vmap":
            torch.vmap(keep)(tensor.expand(2, *tensor.shape))
        case "jvp":
            torch.func.jvp(keep, (tensor,), (tensor,))
        case _:
            return call(tensor, name)
    return found[0]


def small_model() -> nn.Module:
    """Return a model of constants, as vmap refuses random numbers."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(2))
    return model


def module_of(tensor: torch.Tensor) -> nn.Module:
    """Return a module with a buffer "odd", tied to another one, and a parameter."""
    module = small_model()
    module._buffers["odd"] = module._buffers["too"] = tensor
    return module


def broadcast_parameters(tensor: torch.Tensor, name: str) -> object:
    module = module_of(tensor)
    dd.broadcast_parameters(module)
    return module.odd


def broadcast_optimizer_state(tensor: torch.Tensor, name: str) -> object:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["odd"] = tensor
    dd.broadcast_optimizer_state(optimizer)
    return optimizer.state[model.weight]["odd"]


def wrap_optimizer(tensor: torch.Tensor, name: str) -> object:
    param = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
    dd.wrap_optimizer(torch.optim.SGD([param], lr=0.1), [("odd", param)])
    return None


def can_be_a_parameter(kind: str) -> bool:
    """Return True if torch makes a parameter of this kind, and an optimizer of it."""
    try:
        tensor = MAKE[kind]()
        torch.optim.SGD([tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)], lr=0.1)
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError):
        return False
    return kind not in TRANSFORMS


def save_checkpoint(tensor: torch.Tensor, name: str) -> object:
    dd.save_checkpoint(FOLDER[-1], odd=tensor)
    return None


FOLDER: list[str] = []  # of the checkpoints


# Of the first ones the result is the argument, where all ranks pass the same.
SAME: Mapping[str, Call] = {
    "allreduce": lambda t, name: dd.allreduce(t, "max", name=name),
    "allreduce mean": lambda t, name: dd.allreduce(t, name=name),
    "allreduce scaled": lambda t, name: dd.allreduce(t, prescale=2.0, postscale=0.5, name=name),
    "allreduce ordered": lambda t, name: dd.allreduce(t, reduction="ordered", name=name),
    "allreduce async": lambda t, name: dd.allreduce(t, name=name, async_op=True).wait(),
    "allreduce_": lambda t, name: dd.allreduce_(t, name=name),
    "allreduce_ async": lambda t, name: dd.allreduce_(t, "max", name=name, async_op=True).wait(),
    "allreduce_ scaled": lambda t, name: dd.allreduce_(t, prescale=2.0, postscale=0.5, name=name),
    "grouped_allreduce": lambda t, name: dd.grouped_allreduce([torch.ones(2), t], name=name)[1],
    "grouped_allreduce_": lambda t, name: dd.grouped_allreduce_([torch.ones(2), t], name=name)[1],
    "broadcast": lambda t, name: dd.broadcast(t, name=name),
    "broadcast_": lambda t, name: dd.broadcast_(t, name=name),
    "broadcast_ last": lambda t, name: dd.broadcast_(t, dd.size() - 1, name=name),
    "broadcast_parameters": broadcast_parameters,
    "broadcast_optimizer_state": broadcast_optimizer_state,
    "hvd.allreduce": lambda t, name: hvd.allreduce(t, name=name),
    "hvd.broadcast_": lambda t, name: hvd.broadcast_(t, 0, name=name),
}
OTHERS: Mapping[str, Call] = {
    "allgather": lambda t, name: dd.allgather(t, name=name),
    "grouped_allgather": lambda t, name: dd.grouped_allgather([t, torch.ones(2)], name=name),
    "alltoall": lambda t, name: dd.alltoall(t, name=name),
    "alltoall splits": lambda t, name: dd.alltoall(torch.ones(dd.size()), t, name=name),
    "reducescatter": lambda t, name: dd.reducescatter(t, "sum", name=name),
    "gather": lambda t, name: dd.gather(t, name=name),
    "scatter": lambda t, name: dd.scatter(t, name=name),
    "hvd.grouped_allreduce": lambda t, name: hvd.grouped_allreduce([t, torch.ones(2)], name=name),
    "hvd.allgather": lambda t, name: hvd.allgather(t, name=name),
    "hvd.alltoall": lambda t, name: hvd.alltoall(t, name=name),
    "hvd.reducescatter": lambda t, name: hvd.reducescatter(t, name=name),
    "check_consistency": lambda t, name: dd.check_consistency(module_of(t), buffers=True),
    "save_checkpoint": save_checkpoint,
    "wrap_optimizer": wrap_optimizer,
}
CALLS = {**SAME, **OTHERS}
# Where there is no tensor, these take None or other values, or torch itself refuses them.
TAKES_OTHERS = ("alltoall splits", "broadcast_parameters", "broadcast_optimizer_state", "check_consistency")
TAKES_OTHERS = (*TAKES_OTHERS, "save_checkpoint", "scatter", "wrap_optimizer")
# What must not be refused: plain values in any memory, by these functions.
ANY_MEMORY = ("plain", "transposed", "strided", "unaligned", "inference", "conj", "neg", "0-dim", "empty", "no columns")
ANY_MEMORY = (*ANY_MEMORY, "leaf", "result", "parameter", "subclass", "bfloat16")
ANY_ORDERED = tuple(kind for kind in ANY_MEMORY if kind != "conj")
MUST_WORK = {
    *itertools.product(("allreduce mean", "allreduce_", "broadcast", "broadcast_", "allgather"), ANY_MEMORY),
    *itertools.product(("allreduce", "allreduce_ async"), ANY_ORDERED),
    *itertools.product(("broadcast_parameters", "check_consistency", "broadcast_optimizer_state"), ANY_MEMORY),
    *(("broadcast_parameters", kind) for kind in ("expanded", *SPARSE)),
    *(("allreduce mean", kind) for kind in ("coo", "uncoalesced", "expanded", "windows")),
}


def try_draw(function: str, kind: str, odd_ranks: tuple[int, ...]) -> None:
    """Call the function on all ranks, of which some pass this kind of tensor."""
    if function == "wrap_optimizer" and not can_be_a_parameter(kind):
        return
    if function in TAKES_OTHERS and kind in ("None", "list"):
        return
    what = f"{function} of {kind} on {odd_ranks}"
    is_odd, call = dd.rank() in odd_ranks, CALLS[function]
    right = values_of(MAKE[kind]()) if kind in WORKING else plain()
    try:
        found = under(kind, call, MAKE[kind](), "odd") if is_odd else call(right.clone(), "odd")
        outcome, error = "works", ""
    except (DualdistError, hvd.HorovodInternalError, ValueError) as raised:
        outcome, error = "refused", f"{raised}"
        assert "odd" in error or "weight" in error, f"{what}: {error}"  # the other parameter of module_of()
    assert dd.allreduce(torch.ones(1), "sum").item() == dd.size(), what
    outcomes = dd.allgather_object((outcome, error))
    assert len({each for each, _ in outcomes}) == 1, f"{what}: {outcomes}"
    is_unused = function == "save_checkpoint" and 0 not in odd_ranks  # rank 0's values are saved
    if (kind in REFUSED and not is_unused) or ((function, kind) in MUST_WORK and len(odd_ranks) == dd.size()):
        assert (outcome == "refused") == (kind in REFUSED), f"{what}: {outcomes}"
    if outcome == "works" and function in SAME:
        assert_close(values_of(found), right, rtol=0, atol=0, check_stride=False, msg=lambda text: f"{what}: {text}")


def values_of(tensor: object) -> torch.Tensor:
    """Return the values in plain memory."""
    assert isinstance(tensor, torch.Tensor)
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return torch.empty(dense.shape, dtype=dense.dtype).copy_(dense)


def try_draws(seed: int, count: int) -> None:
    """Try this many draws, the same on all ranks."""
    hvd.init()
    FOLDER.append(dd.broadcast_object(tempfile.mkdtemp()))
    drawn = random.Random(seed)
    everything = list(itertools.product(CALLS, MAKE, (False, True)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sparse and nested tensors, which torch calls prototypes
        for function, kind, is_alone in drawn.sample(everything, min(count, len(everything))):
            try_draw(function, kind, (drawn.randrange(dd.size()),) if is_alone else tuple(range(dd.size())))
    dd.barrier()
    shutil.rmtree(FOLDER.pop(), ignore_errors=True)


@law
def tensors_that_cannot_be_sent_are_errors_on_every_rank() -> None:
    try_draws(0, LAW_DRAWS)
