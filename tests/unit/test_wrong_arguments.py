"""Invalid arguments raise a UsageError that says what was expected, and the session goes on."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import dualdist as dd
import dualdist.hvd as hvd
from dualdist.errors import AlreadyInitializedError, UnsupportedError, UsageError

ONE: Any = torch.ones(1)


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


NOT: Any = 3
MISTAKES: dict[str, Callable[[], Any]] = {
    **{
        name: lambda name=name: getattr(dd, name)(NOT)  # type: ignore[misc]
        for name in (
            *("allreduce", "allreduce_", "allgather", "broadcast", "broadcast_", "alltoall", "reducescatter"),
            *("grouped_allreduce", "grouped_allreduce_", "grouped_allgather", "grouped_reducescatter"),
            *("scatter", "gather", "new_group", "remove_group", "broadcast_parameters", "broadcast_optimizer_state"),
            *("wrap_optimizer", "check_consistency", "save_checkpoint", "load_checkpoint"),
        )
    },
    "several, not tensors": lambda: dd.grouped_allreduce([NOT]),
    "a group": lambda: dd.allreduce(ONE, group=NOT),
    "a group of a barrier": lambda: dd.barrier(group=NOT),
    "names": lambda: dd.wrap_optimizer(torch.optim.SGD([ONE.clone().requires_grad_()], 1.0), NOT),
    **{
        f"check_every={every}": lambda every=every: dd.wrap_optimizer(torch.optim.SGD([ONE], 1.0), check_every=every)  # type: ignore[misc]
        for every in (0, -1, 1.5, True, "10")
    },
    "a data set": lambda: dd.Sampler(NOT, remainder="drop"),
    "a sampler": lambda: dd.loader([1], sampler=NOT),
}
# Of the right type, but with a value that is refused by name.
VALUES: list[tuple[Callable[[], Any], str]] = [
    (lambda: dd.allreduce(torch.ones(2, dtype=torch.int64)), "int64.*op='sum'"),
    (lambda: dd.broadcast(ONE, 1), "root=1"),
    (lambda: dd.broadcast(ONE, 0.5), "root"),
    (lambda: dd.broadcast_object(1, "0"), "root"),
    (lambda: dd.broadcast_parameters(nn.Linear(2, 2).parameters()), "named_parameters"),
    (lambda: dd.wrap_optimizer(sgd(), accumulate=0), "accumulate=0"),
    (lambda: dd.wrap_optimizer(sgd(), op="avg"), "sum, adasum.*'mean'"),
    (lambda: dd.wrap_optimizer(sgd(), gradient_predivide_factor=0.0), "gradient_predivide_factor=0.0"),
    (lambda: dd.wrap_optimizer(sgd(), nn.Linear(2, 2).named_parameters()), "lacks"),
    (lambda: dd.wrap_optimizer(dd.wrap_optimizer(sgd())), "already"),
    (lambda: dd.allreduce_(ONE.expand(3)), "contiguous"),
    (lambda: dd.allreduce(ONE, name=b"bytes"), "name=b'bytes'"),
    (lambda: dd.allreduce(ONE, prescale="twice"), "twice"),
    (lambda: dd.allreduce(ONE, postscale=1j), "1j"),
    (lambda: dd.alltoall(ONE, [1.0]), "splits"),
    (lambda: dd.new_group([0.0]), "ranks"),
    (lambda: dd.check_consistency(nn.Linear(2, 2).parameters()), r"named_parameters\(\)"),
    (lambda: dd.check_consistency({"lr": 0.1}), "lr is a float"),
    (lambda: dd.check_consistency(nn.LazyLinear(3)), "run a forward first"),
    (lambda: dd.check_consistency({"s": torch.ones(2).to_sparse()}), "s has the layout torch.sparse_coo"),
    (lambda: dd.check_consistency(nn.Linear(2, 2, device="meta")), "weight is on the meta device"),
    (lambda: dd.barrier(timeout_s=-1), "timeout_s=-1: expected seconds"),
    (lambda: dd.barrier(timeout_s=float("nan")), "timeout_s=nan: expected seconds"),
    (lambda: dd.allreduce(ONE, "avg"), "did you mean 'mean'"),
    (lambda: dd.allreduce(ONE, "average"), "did you mean 'mean'"),
    (lambda: dd.allreduce(ONE, "SUM"), "did you mean 'sum'"),
    (lambda: dd.allreduce(ONE, "prod"), "did you mean 'product'"),
]


@pytest.mark.parametrize("timeout_s", ["30", None, 0, float("nan")])
def test_a_timeout_is_a_number_of_seconds(timeout_s: Any) -> None:
    with pytest.raises(UsageError, match="expected seconds"):
        dd.init(timeout_s=timeout_s)


@pytest.fixture(scope="module")
def session(base_env: dict[str, str]) -> Iterator[None]:
    dd.init()
    yield
    dd.shutdown()


@pytest.mark.parametrize("name", MISTAKES)
def test_an_invalid_argument_raises_usage_error_and_the_session_goes_on(session: None, name: str) -> None:
    with pytest.raises(UsageError, match=r"expected|takes|needs"):
        MISTAKES[name]()
    assert dd.allreduce(ONE).item() == 1.0


@pytest.mark.parametrize(("call", "words"), VALUES)
def test_an_invalid_value_is_named(session: None, call: Callable[[], Any], words: str) -> None:
    with pytest.raises((UsageError, UnsupportedError), match=words):
        call()
    with pytest.raises(AlreadyInitializedError, match="shutdown"):
        dd.init()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dd.allgather(ONE, axis=0), r"^allgather\(\) takes no argument 'axis'$"),
        (lambda: dd.allreduce(ONE, average=True), r"^allreduce\(\) takes no argument 'average'; pass op=\"mean\" or "),
        (lambda: dd.grouped_allreduce_([ONE], prescale_factor=2), "^grouped_allreduce_.*; pass prescale="),
        (lambda: dd.broadcast(ONE, root_rank=0), "^broadcast.*; pass root="),
        (lambda: dd.wrap_optimizer(ONE, bucket_mb=3), "^wrap_optimizer.*; did you mean 'bucket_cap_mb'"),
        (lambda: dd.init(timeout=60), "^init.*; pass timeout_s="),
        (lambda: dd.wrap_optimizer(ONE, backward_passes_per_step=2), "^wrap_optimizer.*; pass accumulate="),
        (lambda: dd.allreduce(ONE, reduce_op="sum"), "^allreduce.*; pass op="),
        (lambda: dd.run(print, nprocs=2), "^run.*; pass np="),
        (lambda: dd.spawn(print, np=2), "^spawn.*; pass nprocs="),
        (lambda: dd.allreduce_(ONE, "sum", 3), r"^allreduce_\(\): too many positional arguments$"),
        (lambda: hvd.allgather(), r"^allgather\(\): missing a required argument: 'tensor'$"),
    ],
)
def test_a_wrong_argument_is_named_with_the_function_and_our_keyword(
    session: None, call: Callable[[], Any], words: str
) -> None:
    """Also once torch's compiler is loaded, which an optimizer does."""
    with pytest.raises(TypeError, match=words):
        call()
    torch.optim.SGD([ONE.clone()], 1.0)
    with pytest.raises(TypeError, match=words):
        call()


def test_a_name_of_torch_distributed_leads_to_ours() -> None:
    with pytest.raises(AttributeError, match=r"'get_rank'; call dd\.rank$"):
        getattr(dd, "get_rank")  # noqa: B009  (type checkers know that there is none)
