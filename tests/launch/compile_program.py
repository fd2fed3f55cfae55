"""Checks of torch.compile on each rank: python compile_program.py BACKEND. A check's name says what holds."""

import copy
import sys
import traceback
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from contract.oracle import assert_close, gradients, net, raises, ranks
from harness.jobs import report
from torch import nn

import dualdist as dd
from dualdist import hvd
from dualdist.errors import MismatchError, UsageError

CHECKS: dict[str, Callable[[], None]] = {}
# All trace the program alike; the latter two also trace gradients, and the last one generates code.
COMPILERS = ("eager", "aot_eager", "inductor")


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def compiled(function: Callable[..., Any], *, fullgraph: bool = False, compiler: str = "eager") -> Any:
    return torch.compile(function, backend=compiler, fullgraph=fullgraph)


def mine() -> torch.Tensor:
    return torch.arange(4.0) + dd.rank()


def of_all_ranks() -> list[torch.Tensor]:
    return [torch.arange(4.0) + rank for rank in ranks()]


def is_traced() -> bool:
    return dd.backend() == "native"


def refused(function: Callable[..., Any], *arguments: Any) -> None:
    """Check that fullgraph=True is refused with the reason."""
    message = ""
    try:
        compiled(function, fullgraph=True)(*arguments)
    except Exception as error:  # torch's own, of a private class
        message = str(error)
    assert "dd.allreduce and hvd.allreduce only, on the native backend" in message, message
    assert "Horovod's engine is no part of torch" in message, message
    assert "leave fullgraph out" in message, message
    torch.compiler.reset()


@check
def a_compiled_model_trains_like_an_eager_one() -> None:
    """Compiled code adds in another order: 1e-5 is far above the rounding of five steps, and far below an error."""
    reference = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9))
    models = {compiler: copy.deepcopy(reference) for compiler in COMPILERS}
    steps(reference, reference, optimizer)
    for compiler, model in models.items():
        optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        steps(compiled(model, compiler=compiler), model, optimizer)
        for found, right in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
        assert_close(gradients(model), gradients(reference))


def steps(forward: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(5):
        optimizer.zero_grad()
        x, y = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(10 * step + dd.rank()))
        nn.functional.mse_loss(forward(x), y[:, :2]).backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.5)
        optimizer.step()


@check
def compiled_allreduce_has_the_values_of_eager_allreduce() -> None:
    stacked = torch.stack(of_all_ranks()) * 2
    methods = {"sum": "sum", "mean": "mean", "min": "amin", "max": "amax", "product": "prod"}
    oracle = {op: getattr(stacked, method)(0) for op, method in methods.items()}
    for op, expected in oracle.items():
        torch.compiler.reset()

        def function(x: torch.Tensor, op: str = op) -> torch.Tensor:
            return dd.allreduce(x * 2, op) + 1  # type: ignore[call-overload, no-any-return]

        found = compiled(function, fullgraph=is_traced())(mine())
        assert torch.equal(found, expected + 1), (op, found)
        if op != "mean":
            for dtype in (torch.int16, torch.int64, torch.bfloat16):
                found = compiled(function, fullgraph=is_traced())(mine().to(dtype))
                assert found.dtype == dtype
                assert torch.equal(found, expected.to(dtype) + 1), (op, dtype, found)
    torch.compiler.reset()
    options = {"prescale": 2.0, "postscale": 3.0, "reduction": "ordered"}
    scaled = compiled(lambda x: dd.allreduce(x, **options), fullgraph=is_traced())
    assert torch.equal(scaled(mine()), oracle["mean"] * 3)


@check
def mismatches_inside_a_graph_are_errors() -> None:
    """Also where only some ranks are compiled, or only the last one recompiles."""

    def function(x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return dd.allreduce(x * 2, op) + 1  # type: ignore[call-overload, no-any-return]

    odd = dd.rank() == dd.size() - 1
    for compiler in COMPILERS:
        torch.compiler.reset()
        step = compiled(function, fullgraph=is_traced(), compiler=compiler)
        for some_are_not in (False, True):
            call = function if some_are_not and odd else step
            wrong = [(torch.ones(2 + odd),), (torch.ones(2), "max" if odd else "sum"), (mine().to(dtype(odd)),)]
            for arguments in wrong if dd.size() > 1 else ():
                raises(MismatchError, lambda call=call, arguments=arguments: call(*arguments), "different arguments")
            assert torch.equal(call(mine()), torch.stack(of_all_ranks()).sum(0) * 2 + 1)
            given = torch.full((2, 3, 4, 4), torch.nan if odd else 1.0).to(memory_format=torch.channels_last)
            assert call(given).is_contiguous(memory_format=torch.channels_last)
            assert call(given, "max").isnan().all()
            logic = torch.tensor([True, odd])
            assert compiled(lambda t: dd.allreduce(t, "sum"), fullgraph=is_traced())(logic).all()


def dtype(is_odd: bool) -> torch.dtype:
    return torch.float64 if is_odd else torch.float32


@check
def compiled_allreduce_is_differentiated() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (dd.allreduce(x.sin()) * torch.arange(4.0) * (dd.rank() + 1)).sum()

    mean_weight = torch.arange(4.0) * sum(rank + 1 for rank in ranks()) / dd.size()
    for compiler in COMPILERS:
        torch.compiler.reset()
        x = mine().requires_grad_()
        found = compiled(function, fullgraph=is_traced(), compiler=compiler)(x)
        mean = sum(other.sin() for other in of_all_ranks()) / dd.size()
        torch.testing.assert_close(found.detach(), (mean * torch.arange(4.0) * (dd.rank() + 1)).sum())
        found.backward()
        torch.testing.assert_close(x.grad, mean_weight * x.detach().cos())


@check
def hvd_allreduce_is_compiled() -> None:
    hvd.init()
    stacked = torch.stack(of_all_ranks()) * 2
    odd = dd.rank() == dd.size() - 1
    for compiler in COMPILERS:
        torch.compiler.reset()
        step = compiled(lambda x: hvd.allreduce(x * 2, op=hvd.Sum) + 1, fullgraph=is_traced(), compiler=compiler)
        torch.testing.assert_close(step(mine()), stacked.sum(0) + 1)
        raises(hvd.HorovodInternalError, lambda step=step: step(torch.ones(2 + odd)), "different arguments")
        x = mine().requires_grad_()
        scaled = lambda x: hvd.allreduce(x * 2, postscale_factor=3.0)  # noqa: E731
        found = compiled(scaled, fullgraph=is_traced(), compiler=compiler)(x)
        torch.testing.assert_close(found.detach(), stacked.mean(0) * 3)
        (found * (dd.rank() + 1)).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((4,), 6.0 * sum(rank + 1 for rank in ranks()) / dd.size()))
    torch.compiler.reset()
    refused(lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16), mine())
    refused(lambda x: hvd.allgather(x), mine())
    broken = compiled(lambda x: hvd.synchronize(hvd.allreduce_async(x * 2, op=hvd.Sum)) + hvd.allgather(x).sum())
    torch.testing.assert_close(broken(mine()), stacked.sum(0) + stacked.sum() / 2)


@check
def allreduce_over_a_group_is_compiled_until_the_group_is_removed() -> None:
    for turn in range(2):
        torch.compiler.reset()  # an error makes it give up on the function
        group = dd.new_group(range(turn, dd.size()))

        def function(x: torch.Tensor, group: Any = group) -> torch.Tensor:
            return dd.allreduce(x, "sum", group=group)

        step = compiled(function, fullgraph=is_traced())
        if group.is_member:
            assert torch.equal(step(mine()), torch.stack(of_all_ranks())[turn:].sum(0))
        dd.remove_group(group)
        try:
            compiled(function)(mine())
        except UsageError:
            continue
        raise AssertionError("a removed group was used")


@check
def a_graph_keeps_its_group_while_others_change() -> None:
    first, whole = dd.new_group([0]), dd.new_group(ranks())
    step = compiled(lambda x: dd.allreduce(x, "sum", group=whole), fullgraph=is_traced())
    x, y = mine().requires_grad_(), mine().requires_grad_()
    results = step(x), step(y)
    dd.remove_group(first)
    others = [dd.new_group([0])]
    results[0].sum().backward()
    assert torch.equal(x.grad, torch.full((4,), float(dd.size())))
    assert torch.equal(step(mine()), torch.stack(of_all_ranks()).sum(0))
    dd.remove_group(whole)
    others.append(dd.new_group(ranks()))
    raises(UsageError, results[1].sum().backward, "closed")
    for group in others:
        dd.remove_group(group)


@check
def fullgraph_is_refused_for_what_runs_between_graphs() -> None:
    refused(lambda x: dd.allreduce(x, "adasum"), mine())
    refused(lambda x: dd.allreduce(x, async_op=True).wait(), mine())
    refused(lambda x: dd.allreduce(x, "max"), mine().requires_grad_())
    refused(lambda x: dd.allgather(x), mine())
    refused(dd.SyncBatchNorm(1), mine().view(4, 1))
    if not is_traced():
        refused(lambda x: dd.allreduce(x), mine())
    stacked = torch.stack(of_all_ranks())
    assert torch.equal(compiled(lambda x: dd.allreduce(x, async_op=True).wait() * 2)(mine()), stacked.mean(0) * 2)
    handle = compiled(lambda x: dd.allreduce(x + 1, "max", async_op=True))(mine())
    assert torch.equal(handle.wait(), stacked.amax(0) + 1)


@check
def other_collectives_run_between_graphs() -> None:
    """Twelve in one function: torch.compile gives up, with a warning, on code that it has compiled eight times."""
    stacked, size = torch.stack(of_all_ranks()), dd.size()

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        x = x * 1
        results = [
            dd.allgather(x * 2) / 2,
            dd.broadcast(x + 1, size - 1) - 1,
            dd.alltoall(x.repeat_interleave(size)),
            dd.reducescatter(torch.cat([x] * size), "sum") * 1,
            dd.grouped_allreduce([x, x + 1], "max")[1] - 1,
            dd.grouped_allgather([x])[0],
            dd.allreduce_(x.clone(), "sum"),
            dd.broadcast_(x.clone()),
            dd.grouped_allreduce_([x.clone()], "sum")[0],
            dd.grouped_reducescatter([torch.cat([x] * size)], "sum")[0],
        ]
        dd.barrier()
        results.append(torch.tensor(dd.allgather_object(dd.rank())) * 1)
        return results

    expected = [
        stacked.flatten(),
        stacked[-1],
        None,
        stacked.sum(0),
        stacked.amax(0),
        stacked.flatten(),
        stacked.sum(0),
        stacked[0],
        stacked.sum(0),
        stacked.sum(0),
        torch.arange(size),
    ]
    step = compiled(function)
    for _ in range(3):
        for found, right, plain in zip(step(mine()), expected, function(mine()), strict=True):
            assert torch.equal(found, plain)
            assert right is None or torch.equal(found, right), (found, right)


@check
def scatter_gather_and_gradients_run_between_graphs() -> None:
    stacked, size = torch.stack(of_all_ranks()), dd.size()
    step = compiled(lambda x: (dd.scatter(torch.cat([x * 2] * size)) / 2, dd.gather(x * 1) + 1))
    for _ in range(3):
        scattered, gathered = step(mine())
        assert torch.equal(scattered, stacked[0])
        assert torch.equal(gathered, stacked.flatten()[: stacked.numel() * (dd.rank() == 0)] + 1)
    x = mine().requires_grad_()
    compiled(lambda x: (dd.allgather(x * 3) * torch.arange(4.0 * size)).sum())(x).backward()
    torch.testing.assert_close(x.grad, 3 * torch.arange(4.0 * size)[4 * dd.rank() : 4 * dd.rank() + 4])


@check
def many_shapes_do_not_exceed_the_recompile_limit() -> None:
    """torch.compile gives up, with a warning, on code that it has compiled eight times."""

    def one_of_many(operation: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        return operation(x, async_op=True).wait()  # type: ignore[no-any-return]

    for operation in (dd.allgather, dd.allreduce):
        for number in range(10):
            code = one_of_many.__code__.replace(co_name=f"{operation.__name__}_{number}")
            step = compiled(FunctionType(code, one_of_many.__globals__))
            assert step(operation, torch.ones(2, *([1] * number))).flatten().tolist()[:2] == [1, 1]


@check
def sync_batch_norm_runs_between_graphs() -> None:
    layer = nn.Sequential(nn.Linear(6, 3), dd.SyncBatchNorm(3), nn.Tanh())
    dd.broadcast_parameters(layer)
    twin = copy.deepcopy(layer)
    step = compiled(layer)
    for number in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * number + dd.rank()))
        found, right = step(x), twin(x)
        torch.testing.assert_close(found, right)
        found.square().sum().backward()
        right.square().sum().backward()
    for parameter, other in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


@check
def a_result_that_nobody_uses_keeps_its_call() -> None:
    """Or a compiled rank's next call would meet an eager one's first."""
    for compiler in COMPILERS:
        torch.compiler.reset()
        function = unused_allreduce
        step = function if dd.rank() == dd.size() - 1 else compiled(function, compiler=compiler)
        assert torch.equal(step(mine()), mine() * 2)
        assert torch.equal(dd.allreduce(mine(), "sum"), torch.stack(of_all_ranks()).sum(0)), compiler


def unused_allreduce(x: torch.Tensor) -> torch.Tensor:
    dd.allreduce(x * 3)
    return x * 2


@check
def a_new_session_recompiles() -> None:
    step = compiled(lambda x: dd.allreduce(x, "sum"), fullgraph=is_traced())
    for _ in range(2):
        assert torch.equal(step(mine()), torch.stack(of_all_ranks()).sum(0))
        dd.shutdown()
        dd.init(sys.argv[1], timeout_s=60)
        assert torch.equal(step(mine()), torch.stack(of_all_ranks()).sum(0))


def main() -> None:
    torch.set_num_threads(1)
    dd.init(sys.argv[1], timeout_s=60)
    failures = {}
    for name, function in CHECKS.items():
        torch.compiler.reset()
        try:
            function()
        except Exception:
            failures[name] = traceback.format_exc()
    rank, backend = dd.rank(), dd.backend()
    dd.shutdown()
    report(rank, {"backend": backend, "failures": failures, "checked": list(CHECKS)})


if __name__ == "__main__":
    main()
