"""The ranks of test_accelerator.py and test_gpu.py: python accelerator_program.py WHAT DEVICE LIBRARY FOLDER.

WHAT is one of TASKS, or several with commas between, "late" as the last. DEVICE is the simulated accelerator or the one
that torch sees, LIBRARY its collective library, or "" without one.
"""

import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from contract.oracle import raises
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import dualdist as dd
from dualdist.errors import CollectiveError, UnsupportedError

WHAT, DEVICE, LIBRARY, FOLDER = sys.argv[1:]
SIMULATED = "simulated"
STEPS_BEFORE = 3  # after which all ranks know that every member has been dense
TIMEOUT_S = 10.0


class Recorder(TorchDispatchMode):
    """Records operators with the kinds of memory of their tensors: the device, "pinned" or "pageable"."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [kind_of(each) for each in torch.utils._pytree.tree_leaves((args, kwargs, result))]
        kinds = " ".join(sorted({each for each in given if each}))
        is_copy = func._schema.name in ("aten::copy_", "aten::_to_copy") and len(kinds.split()) > 1
        waits = is_copy and not ((kwargs or {}).get("non_blocking") or True in args[2:])
        self.found[f"{func} [{kinds}]" + " blocking" * waits] += 1
        return result


def kind_of(value: object) -> str:
    """Return the kind of memory of a tensor; none for numbers, which torch keeps in tensors of the CPU."""
    if not isinstance(value, torch.Tensor):
        return ""
    if value.device.type != "cpu":
        return value.device.type
    return "pinned" if value.is_pinned() else "pageable" if value.dim() else ""


@contextmanager
def recorded() -> Iterator[tuple[Counter[str], list[str]]]:
    """Record the operators of the block, and what the host waits for in it: CUDA warns of that if it is asked."""
    waits: list[str] = []
    with Recorder() as recorder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if DEVICE == SIMULATED:
            simulated().host_waits()
        else:
            torch.cuda.set_sync_debug_mode("warn")
        yield recorder.found, waits
    if DEVICE == SIMULATED:
        waits += simulated().host_waits()
    else:
        torch.cuda.set_sync_debug_mode("default")
        waits += [f"{each.message}" for each in caught if "synchroniz" in f"{each.message}"]


def simulated() -> Any:
    from harness.accelerator import device

    return device


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def compute(x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).tanh()).tanh()

        hidden: Any = checkpoint(compute, x, use_reentrant=False, preserve_rng_state=False)
        return self.last(hidden)


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(dd.rank())
    return [torch.randn(8, 6, generator=generator, device="cpu").to(DEVICE) for _ in range(count)]


def stepper(model: nn.Module, optimizer: Any, *, accumulate: int = 1, scales: bool = False) -> Callable[..., None]:
    """Return a function that takes one training step on some batches."""
    scaler = torch.amp.GradScaler(DEVICE, enabled=scales)

    def step(inputs: list[torch.Tensor]) -> None:
        optimizer.zero_grad()
        for x in inputs[:accumulate]:
            scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        dd.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()

    return step


def steps() -> None:
    """No operator of ours moves data between device and host, reads a number or waits, in any kind of step."""
    for options, wrapped in (
        ({}, {}),
        ({"accumulate": 2}, {"accumulate": 2}),
        ({"scales": True}, {}),
        ({}, {"shard": True}),
        ({}, {"compression": "bf16"}),
        ({}, {"reduction": "ordered"}),
    ):
        found = []
        for is_ours in (False, True):
            model = Net().to(DEVICE)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            if is_ours:
                dd.broadcast_parameters(model)
                dd.wrap_optimizer(optimizer, model.named_parameters(), bucket_cap_mb=0.001, **wrapped)  # type: ignore[arg-type]
            step, inputs = stepper(model, optimizer, **options), batches(2)  # type: ignore[arg-type]
            for _ in range(STEPS_BEFORE):
                step(inputs)
            with recorded() as (operators, waits):
                step(inputs)
            found.append((operators, Counter(waits)))
        (plain, usual_waits), (ours, waits) = found
        assert waits - usual_waits == Counter(), (wrapped, waits - usual_waits)
        added = ours - plain
        moved = [each for each in added if "pageable" in each or "blocking" in each or "_local_scalar" in each]
        assert not moved, (wrapped, moved)
        assert sum(added.values()) > 0, "nothing was recorded"


def order() -> None:
    """Collectives that a program begins beside a backward are begun in its order on every rank."""
    weights = [nn.Parameter(torch.ones(2000, device=DEVICE)) for _ in range(4)]
    optimizer = dd.wrap_optimizer(torch.optim.SGD(weights, lr=0.1), bucket_cap_mb=0.01, first_bucket_mb=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        time.sleep(random.uniform(0, 0.03))  # a thread would begin them once all ranks have, after some ranks' buckets
        begun = [
            dd.allreduce(torch.full((500 + n,), float(dd.rank() + n), device=DEVICE), "sum", async_op=True)
            for n in range(3)
        ]
        sum((weight * (dd.rank() + 1)).sum() for weight in weights).backward()
        assert all((weight.grad == 1.5).all() for weight in weights)
        for n, handle in enumerate(begun):
            assert (handle.wait() == 1 + 2 * n).all()
        optimizer.step()
    names = ["x", "y"] if dd.rank() == 0 else ["y", "x"]
    handles = [dd.allreduce(torch.ones(9, device=DEVICE), "sum", name=name, async_op=True) for name in names]
    while not all(handle.done() for handle in handles):  # which another order of calls leaves to polls
        time.sleep(0.001)
    assert all((handle.wait() == 2).all() for handle in handles)


def late() -> None:
    """A device that waits for another rank is bounded, and the error is ours; the device goes on."""
    value = torch.ones(1000, device=DEVICE)
    dd.allreduce(value, "sum")
    group = dd.session.current().world  # type: ignore[attr-defined]
    if dd.rank() == 0:
        began = time.monotonic()
        _ = group.backend.allreduce_(value.clone(), "sum", "of one rank alone").result
        torch.accelerator.synchronize()
        assert TIMEOUT_S <= time.monotonic() - began < 4 * TIMEOUT_S
        words = ("of one rank alone", f"the device did not end it within {TIMEOUT_S:g} s")
        raises(CollectiveError, lambda: dd.allreduce(value), *words)
    else:
        time.sleep(2 * TIMEOUT_S)
        raises(CollectiveError, lambda: dd.allreduce(value), "of one rank alone")


def end() -> None:
    """The end of a session waits for what the device still computes."""
    value, size = torch.ones(5000, device=DEVICE), dd.size()
    if DEVICE == SIMULATED:  # whose operators wait for what is queued before them
        simulated().enqueue(lambda: time.sleep(1.0))
    found = dd.allreduce_(value, "sum")
    dd.shutdown()
    assert (found == size).all()
    dd.init()


def join() -> None:
    raises(UnsupportedError, dd.join, "simccl", "DUALDIST_TRANSPORT=gloo")


def resume() -> None:
    """A training in a stream of its own that is saved and resumed ends with the same bits."""
    path = Path(FOLDER, "saved.pt")
    hashes, side = [], torch.Stream(device=DEVICE)
    for parts in ((6,), (3, 3)):
        model = Net().to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        dd.wrap_optimizer(optimizer, model.named_parameters(), bucket_cap_mb=0.001)
        inputs = batches(6)
        for number, count in enumerate(parts):
            if number:
                dd.save_checkpoint(path, model=model, optimizer=optimizer)
                model = Net().to(DEVICE)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                dd.wrap_optimizer(optimizer, model.named_parameters(), bucket_cap_mb=0.001)
                dd.load_checkpoint(path, model=model, optimizer=optimizer)
            step = stepper(model, optimizer)
            for place in range(count):
                side.wait_stream(torch.accelerator.current_stream())
                with side:
                    step([inputs[number * 3 + place]])
                torch.accelerator.current_stream().wait_stream(side)
        hashes.append([param.detach().cpu().tolist() for param in model.parameters()])
    assert hashes[0] == hashes[1]
    assert len({str(each) for each in dd.allgather_object(hashes[0])}) == 1


def laws() -> None:
    """The contract's laws that are about accelerators, with all tensors on this one."""
    from contract import rank
    from contract.accelerators import laws_on_accelerators

    dd.shutdown()
    torch.set_default_device(DEVICE)
    for name in ["training", "ordered training", *laws_on_accelerators(has_library=bool(LIBRARY))]:
        try:
            rank.run("native", name)
        except BaseException:
            print(f"the law that failed: {name}", file=sys.stderr)
            raise
    if not dd.is_initialized():
        dd.init()


def beside() -> None:
    """DistributedDataParallel and FSDP2 train in a session, on torch's default group."""
    from torch.distributed.fsdp import fully_shard

    for wrap in (nn.parallel.DistributedDataParallel, fully_shard):
        model: Any = wrap(Net().to(dd.device()))  # type: ignore[operator]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in batches(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()


TASKS = {task.__name__: task for task in (steps, order, late, end, join, resume, laws, beside)}


def main() -> None:
    if DEVICE == SIMULATED:
        assert simulated().NAME == DEVICE
        if LIBRARY:
            simulated().register_library()
    for what in WHAT.split(","):
        dd.init(timeout_s=TIMEOUT_S if what == "late" else 40)
        assert (dd.device().type, dd.transport()) == (DEVICE, LIBRARY or os.environ.get("DUALDIST_TRANSPORT", "shm"))
        TASKS[what]()
        if what != "late":
            dd.shutdown()
    print(f"{WHAT} holds", flush=True)
    os._exit(0)  # a program that goes on after a failure, as of "late", ends with status 1


if __name__ == "__main__":
    main()
