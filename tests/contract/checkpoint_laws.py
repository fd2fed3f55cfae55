"""Samplers, loaders and checkpoints: every sample once per epoch, and runs resumed where they were saved."""

import contextlib
import copy
import random
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contract.oracle import digest, law, law_alone, net, raises, refuse
from torch import nn
from torch.utils.data import IterableDataset

import dualdist as dd
from dualdist.checkpoint.files import METADATA, FileProgress, read, write
from dualdist.data.sampler import Remainder
from dualdist.errors import CheckpointError, MismatchError, UsageError
from dualdist.utils.machine import reset_peak, resident_kib

SAMPLES = 50
BATCH = 3


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Yield a folder on rank 0, and on the others a path that cannot be created."""
    path = Path(tempfile.mkdtemp(prefix="dualdist-laws-")) if dd.rank() == 0 else Path("/proc/nowhere")
    try:
        yield path / "run"
    finally:
        dd.barrier()
        if dd.rank() == 0:
            shutil.rmtree(path)


class Crossed(nn.Module):
    """Gradients do not become ready in reverse parameter order: buckets are planned again after a step."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.last = nn.Sequential(nn.Linear(2, 64), nn.Dropout(0.3), nn.Linear(64, 2))
        self.first = net(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


class Training:
    """A run with all kinds of state: momentum, schedule, shuffling, dropout, random numbers of Python and NumPy."""

    def __init__(self, seed: int) -> None:
        self.model = Crossed(seed)
        self.optimizer = dd.wrap_optimizer(torch.optim.AdamW(self.model.parameters(), lr=0.01))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.sampler = dd.Sampler(range(SAMPLES), remainder="pad", seed=4)
        self.seen: list[Any] = []
        self.parts = {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "sampler")}
        for draw in (torch.manual_seed, random.seed, np.random.seed):
            draw(100 * seed + dd.rank())

    def steps(self, count: int) -> None:
        loader = dd.loader(range(SAMPLES), BATCH, sampler=self.sampler)
        while True:
            for batch in loader:
                noise = random.random() + float(np.random.rand())
                x = torch.sin(batch[:, None] * torch.arange(1.0, 7.0)) + noise
                self.optimizer.zero_grad()
                (self.model(x) - x[:, :2]).square().mean().backward()
                self.optimizer.step()
                self.scheduler.step()
                self.seen.append((self.sampler.epoch, batch.tolist(), noise))
                count -= 1
                if not count:
                    return


@law
def a_resumed_run_equals_an_uninterrupted_one() -> None:
    """To the bit, with the random states of each rank."""
    with folder() as path:
        whole = Training(seed=1)
        whole.steps(7)
        dd.save_checkpoint(path, **whole.parts, note={"step": 7})
        whole.steps(8)
        after = torch.rand(3), whole.sampler.state_dict()
        resumed = Training(seed=2)
        assert dd.load_checkpoint(path, **resumed.parts) == {"note": {"step": 7}}
        resumed.steps(8)
        assert resumed.seen == whole.seen[7:]
        assert torch.equal(torch.rand(3), after[0])
        assert resumed.sampler.state_dict() == after[1]
        assert resumed.scheduler.state_dict() == whole.scheduler.state_dict()
        assert digest(resumed.model) == digest(whole.model)
        assert len({*dd.allgather_object(tuple(noise for _, _, noise in whole.seen))}) == dd.size()
        dd.save_checkpoint(path)
        drawn = torch.rand(3)
        dd.load_checkpoint(path, random=False)
        assert not torch.equal(torch.rand(3), drawn)


class SharedStep(torch.optim.Optimizer):
    """SGD with a decaying rate; the step count is one tensor in the state of all parameters."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        if not self.state:
            self.state.update((param, {"step": step}) for step in [torch.zeros(())] for param in params)
        self.state[params[0]]["step"] += 1
        for param in params:
            param.sub_(param.grad, alpha=0.1 / self.state[param]["step"].item())


@law_alone
def a_loaded_bucket_order_is_used_after_backwards_that_raised() -> None:
    """At a different layer on each rank: as many buckets had not been sent."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(100, 100) for _ in range(4)])
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
    dd.wrap_optimizer(optimizer, layers.named_parameters(), bucket_cap_mb=0.03, first_bucket_mb=0.03)

    def backward(raising: int | None = None) -> None:
        optimizer.zero_grad()
        x = torch.full((1, 100), dd.rank() + 1.0)
        for number, layer in enumerate(layers):
            if number == raising:
                x.register_hook(refuse)
            x = layer(x)
        x.sum().backward()

    with folder() as path:
        backward()
        dd.save_checkpoint(path, model=layers, optimizer=optimizer)
        if dd.rank() == 0:
            content = read(path / "checkpoint-00000001.pt", FileProgress()).content
            content[METADATA]["orders"]["optimizer"].reverse()
            write(path, content, None, FileProgress())
        raises(ValueError, lambda: backward(1 + dd.rank() % 2))
        dd.load_checkpoint(path, model=layers, optimizer=optimizer)
        for _ in range(2):
            backward()
            assert len({*dd.allgather_object(sum(param.grad.sum().item() for param in layers.parameters()))}) == 1
            assert layers[3].bias.grad.unique().tolist() == [1.0]


@law
def optimizer_state_shared_by_parameters_stays_shared() -> None:
    with folder() as path:
        models = [net(3) for _ in range(2)]
        optimizers = [dd.wrap_optimizer(SharedStep(model.parameters())) for model in models]
        step(models[0], optimizers[0])
        dd.save_checkpoint(path, model=models[0], optimizer=optimizers[0])
        dd.load_checkpoint(path, model=models[1], optimizer=optimizers[1])
        dd.broadcast_parameters(models[0])
        dd.broadcast_optimizer_state(optimizers[0])
        for model, optimizer in zip(models, optimizers, strict=True):
            for _ in range(3):
                step(model, optimizer)
        assert len({*map(digest, models), *dd.allgather_object(digest(models[0]))}) == 1


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()


class Numbers(IterableDataset[int]):
    """Shuffled by Python's random module, which is seeded differently on each rank."""

    def __iter__(self) -> Iterator[int]:
        numbers = list(range(SAMPLES))
        random.shuffle(numbers)
        return iter(numbers)


@law
def every_sample_is_seen_once_per_epoch() -> None:
    """For every remainder, also from the middle of an epoch."""
    random.seed(dd.rank())
    for remainder in ("drop", "pad", "uneven"):
        for count in (0, 1, 7, 12, 50):
            sampler = dd.Sampler(range(count), remainder=remainder, seed=count)
            loader = dd.loader(range(count), 2, sampler=sampler)
            # If that batch ended the share, the next loop would be the next epoch's.
            first = next(iter(loader)).tolist() if count >= 3 * dd.size() else []
            assert sampler.position == sum(map(len, dd.allgather_object(first)))
            check_once(first + samples_of(loader), count, remainder)
            assert sampler.epoch == 1
        loader = dd.loader(Numbers(), BATCH, sampler=dd.Sampler(Numbers(), remainder=remainder, shuffle=False))
        epochs = [next(iter(loader)).tolist() + samples_of(loader) for _ in range(2)]
        for seen in epochs:
            check_once(seen, SAMPLES, remainder)
        assert epochs[0] != epochs[1]


def samples_of(loader: Iterable[torch.Tensor]) -> list[int]:
    return [sample for batch in loader for sample in batch.tolist()]


def check_once(mine: list[int], count: int, remainder: Remainder) -> None:
    """Check that all ranks have seen each of `count` samples as often as the remainder says."""
    seen = [sample for share in dd.allgather_object(mine) for sample in share]
    more = count % dd.size()
    if remainder == "pad":
        assert set(seen) == set(range(count))
        assert len(seen) == count + (dd.size() - more if more else 0)
    else:
        assert len(set(seen)) == len(seen) == count - (more if remainder == "drop" else 0)


@law
def async_saves_write_the_values_at_the_call_and_load_waits_for_them() -> None:
    with folder() as path:
        weight = torch.full((1 << 20,), 1.0)
        saving = dd.save_checkpoint(path, weight=weight, async_op=True)
        weight.fill_(2.0)
        file = saving.wait()
        assert len({*dd.allgather_object((file, saving.wait()))}) == 1
        found = dd.load_checkpoint(path)
        assert found is not None
        assert found["weight"].unique().tolist() == [1.0]
        for step in range(5):
            dd.save_checkpoint(path, weight=weight, step=step, async_op=True)
            found = dd.load_checkpoint(path)
            assert found is not None
            assert found["step"] == step
        dd.save_checkpoint(path / "not" / "there", async_op=True)
        raises(CheckpointError, lambda: dd.load_checkpoint(path), "no folder")
        assert dd.load_checkpoint(path) is not None


@law
def disk_errors_are_raised_on_every_rank() -> None:
    with folder() as path:
        dd.save_checkpoint(path, step=1)
        raises(CheckpointError, lambda: dd.save_checkpoint(path / "not" / "there", step=2), "no folder", "not")
        dd.save_checkpoint(path / "not" / "there", step=2, async_op=True)
        assert dd.allreduce(torch.ones(1), "sum").item() == dd.size()
        raises(CheckpointError, lambda: dd.save_checkpoint(path, step=3), "no folder")
        assert dd.load_checkpoint(path) == {"step": 1}
        assert dd.load_checkpoint(path / "none") is None
        raises(CheckpointError, lambda: dd.load_checkpoint(path / "none", required=True), "no checkpoint", "none")


@law
def a_checkpoint_that_does_not_match_changes_nothing() -> None:
    with folder() as path:
        model = nn.Linear(3, 2)
        turned = torch.optim.SGD([model.bias, model.weight], lr=1.0)
        dd.save_checkpoint(path, model=model, sampler=dd.Sampler(range(5), remainder="pad"), turned=turned)
        other = nn.Sequential(nn.Linear(3, 2))
        before = digest(other)
        optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
        wrong: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
            ({"model": other}, ("only in the file: weight, bias", "only in the program: 0.weight, 0.bias")),
            ({"model": nn.Linear(4, 2)}, ("weight is (2, 3) in the file, (2, 4) in the program",)),
            ({"model": model, "optimizer": optimizer}, ("it holds no optimizer, only model, sampler",)),
            ({"turned": optimizer}, ("parameter 0 is (2,) in the file, (2, 3) in the program", "parameter 1 is")),
            ({"model": model, "sampler": dd.Sampler(range(6), remainder="pad")}, ("count 5 in the state",)),
            # On one rank only: the others must not continue without it.
            ({"model": nn.Linear(3, 2 + (dd.rank() == dd.size() - 1))}, ("(2, 3) in the file",)),
        )
        for parts, words in wrong:
            raises(CheckpointError, lambda parts=parts: dd.load_checkpoint(path, **parts), *words)  # type: ignore[misc]
        assert digest(other) == before


class Refusing:
    """Refuses a state on the last rank, after it has taken half of it."""

    def __init__(self, count: int) -> None:
        self.count, self.half = count, 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count, "half": self.half}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]
        if state["count"] == 7 and dd.rank() == dd.size() - 1:
            raise ValueError("seven is refused")
        self.half = state["half"]


@law_alone
def a_load_needs_little_memory_above_what_stays() -> None:
    """On one machine; between others a rank needs what it is sent."""
    if len({*dd.allgather_object(Path("/proc/sys/kernel/random/boot_id").read_text())}) > 1:
        return
    with folder() as path:
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))  # 32 MiB, and as much of momentum
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        dd.save_checkpoint(path, model=model, optimizer=optimizer)
        for _ in range(2):  # without and with a momentum that is replaced
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(dd.rank())
            reset_peak()
            before = resident_kib()
            dd.load_checkpoint(path, model=model, optimizer=optimizer)
            peak, after = resident_kib(peak=True), resident_kib()
            assert None not in (before, peak, after)
            assert peak - max(before, after) < 48 << 10, (before, after, peak)
            assert len({*dd.allgather_object(digest(model))}) == 1
            assert not re.search(r"checkpoint-\d+\.pt", Path("/proc/self/maps").read_text()), "the file stays mapped"


@law
def a_load_that_one_object_refuses_on_one_rank_changes_nothing_on_any_rank() -> None:
    with folder() as path:
        saved = Training(seed=1)
        saved.steps(3)
        dd.save_checkpoint(path, **saved.parts, zz=Refusing(7))
        for seed, steps in ((2, 0), (3, 2)):  # without and with momentum, shuffling and a schedule under way
            own, refusing = Training(seed), Refusing(1)
            own.steps(steps) if steps else None
            before = digest(own.model), own.optimizer.state_dict(), own.sampler.state_dict(), own.scheduler.state_dict()
            before, draws = copy.deepcopy(before), dd.allgather_object(random.getstate())
            load = lambda: dd.load_checkpoint(path, **own.parts, zz=refusing)  # noqa: B023, E731
            raises(CheckpointError, load, "zz refuses its state: ValueError: seven is refused")
            found = digest(own.model), own.optimizer.state_dict(), own.sampler.state_dict(), own.scheduler.state_dict()
            assert found[0] == before[0]
            assert str(found[1:]) == str(before[1:])
            assert refusing.state_dict() == {"count": 1, "half": 0}
            assert dd.allgather_object(random.getstate()) == draws


@law
def different_arguments_of_save_or_load_are_errors_on_every_rank() -> None:
    with folder() as path:
        last = dd.rank() == dd.size() - 1
        raises(UsageError, lambda: dd.save_checkpoint(path, keep=0 if last else 3), "keep=0")
        if dd.size() > 1:
            raises(MismatchError, lambda: dd.save_checkpoint(path, **({"a": 1} if last else {"b": 1})), "parts")
            raises(MismatchError, lambda: dd.load_checkpoint(path, required=last), "required")
            raises(UsageError, lambda: dd.save_checkpoint(path, a=print if dd.rank() == 0 else 1), "a cannot be saved")
        dd.save_checkpoint(path)
        assert dd.load_checkpoint(path) == {}


@law
def sampler_positions_that_differ_are_an_error_on_saving() -> None:
    """Unless shares differ in length, where some ranks may have finished the epoch."""
    with folder() as path:
        for remainder in ("drop", "pad", "uneven"):
            for count in (7, 12):
                sampler = dd.Sampler(range(count), remainder=remainder)
                for _ in range(2):
                    steps = iter(dd.loader(range(count), 1, sampler=sampler))
                    for _ in range(-(-count // dd.size())):
                        next(steps, None)
                        dd.save_checkpoint(path, sampler=sampler)
        sampler = dd.Sampler(range(SAMPLES), remainder="drop")
        for _ in zip(range(1 + (dd.rank() != 0)), dd.loader(range(SAMPLES), 1, sampler=sampler), strict=False):
            pass
        if dd.size() > 1:
            raises(MismatchError, lambda: dd.save_checkpoint(path, sampler=sampler), "sampler", "rank 0", "position")


@law
def damaged_checkpoints_are_skipped_on_every_rank() -> None:
    with folder() as path:
        for step in (1, 2):
            dd.save_checkpoint(path, step=step)
        if dd.rank() == 0:
            newest = path / "checkpoint-00000002.pt"
            newest.write_bytes(newest.read_bytes()[:-1])
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            assert dd.load_checkpoint(path) == {"step": 1}
        assert ["checkpoint-00000002.pt is truncated" in str(one.message) for one in warned] == [True] * (
            dd.rank() == 0
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            raises(RuntimeWarning, lambda: dd.load_checkpoint(path), "checkpoint-00000002.pt is truncated")
        if dd.rank() == 0:
            (path / "checkpoint-00000003.pt").symlink_to(path / "checkpoint-00000003.pt")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert dd.load_checkpoint(path) == {"step": 1}
        dd.barrier()
        if dd.rank() == 0:
            (path / "checkpoint-00000003.pt").unlink()
        dd.save_checkpoint(path, step=3, keep=2)
        if dd.rank() == 0:
            (path / "checkpoint-00000003.pt").unlink()
            (path / "checkpoint-00000001.pt").write_bytes((path / "checkpoint-00000001.pt").read_bytes()[:7])
        raises(CheckpointError, lambda: dd.load_checkpoint(path), "00000001.pt is truncated", "00000002.pt")


@law
def elastic_state_syncs_from_rank_0() -> None:
    layer = torch.nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.fill_(dd.rank() + 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1 * (dd.rank() + 1), momentum=0.9)
    optimizer.zero_grad()
    layer(torch.full((1, 2), 1.0 + dd.rank())).sum().backward()
    optimizer.step()
    state = dd.elastic.State(layer=layer, optimizer=optimizer, step=dd.rank())
    state.sync()
    found = (digest(layer), optimizer.param_groups[0]["lr"], state.step)
    assert found[1:] == (0.1, 0)
    assert len({*dd.allgather_object(found)}) == 1


class OwnState:
    """An object of the program, whose state cannot be read on rank 0 or set on the last rank."""

    def __init__(self, refuses: str) -> None:
        self.refuses = refuses

    def state_dict(self) -> dict[str, int]:
        return {} if self.refuses != "state_dict" else {}["missing"]

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert self.refuses != "load_state_dict" or dd.rank() != dd.size() - 1, "not here"


@law
def an_error_of_one_ranks_object_is_raised_by_sync_on_every_rank() -> None:
    raises(UsageError, dd.elastic.State(own=OwnState("state_dict")).sync, "own: KeyError: 'missing'")
    if dd.size() > 1:
        raises(
            UsageError,
            dd.elastic.State(own=OwnState("load_state_dict")).sync,
            f"rank {dd.size() - 1}: own: ",
            "not here",
        )
    dd.elastic.State(own=OwnState("")).sync()


@law
def uneven_samplers_know_which_batches_all_ranks_have() -> None:
    sampler = dd.Sampler(range(2 * dd.size() + 1), remainder="uneven", shuffle=False)
    found = []
    for _ in sampler:
        sampler.record(1)
        found.append(sampler.all_ranks_had_batch)
    assert found == [True, True, dd.size() == 1][: 3 if dd.rank() == 0 else 2]
