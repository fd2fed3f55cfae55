"""Horovod's elastic states, samplers and loop, in one process."""

import copy
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import dualdist.hvd as hvd
from dualdist.errors import CollectiveError, MismatchError
from dualdist.hvd import elastic
from dualdist.hvd.common import HorovodInternalError, HostsUpdatedInterrupt
from dualdist.hvd.elastic import HostUpdateResult, State, notification_manager


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    with mock.patch.dict(os.environ):  # hvd.init() sets Horovod's variables
        hvd.init()
        yield
        hvd.shutdown()


def model() -> nn.Linear:
    layer = nn.Linear(2, 1)
    nn.init.constant_(layer.weight, 1.0)
    return layer


def step(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_restore_returns_to_the_last_commit_every_time() -> None:
    """Optimizers change the tensors that they load: a second restore must not see the changes after the first."""
    layer = model()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    held = hvd.elastic.TorchState(layer, optimizer, epoch=3, losses=[1.0])
    assert (held.model, held.optimizer, held.epoch) == (layer, optimizer, 3)
    step(layer, optimizer)
    held.epoch, held.losses = 4, [1.0, 2.0]
    held.commit()
    kept = copy.deepcopy((layer.state_dict(), optimizer.state_dict()))
    for _ in range(2):
        step(layer, optimizer)
        held.epoch = 5
        held.losses.append(3.0)
        held.restore()
        assert (held.epoch, held.losses) == (4, [1.0, 2.0])
        for found, right in zip((layer.state_dict(), optimizer.state_dict()), kept, strict=True):
            torch.testing.assert_close(found, right, rtol=0, atol=0)


def test_an_assigned_value_is_handled_and_saved() -> None:
    held = hvd.elastic.TorchState(model(), None, epoch=1)
    assert held.optimizer is None
    other = model()
    nn.init.constant_(other.weight, 7.0)
    held.model = other
    nn.init.constant_(other.weight, 8.0)
    held.restore()
    assert held.model is other
    assert other.weight.unique().item() == 7.0


def test_sync_gives_and_commits_rank_zeros_values() -> None:
    """Patched by the names that Horovod's own tests replace. In Horovod a restore brings back this rank's tensors."""
    layer = model()

    def fill(params: dict[str, torch.Tensor], root_rank: int) -> None:
        for tensor in params.values():
            tensor.fill_(5.0)

    with (
        mock.patch("dualdist.hvd.elastic.broadcast_object", return_value={"optimizer": None, "epoch": 9}),
        mock.patch("dualdist.hvd.elastic.broadcast_parameters", fill),
    ):
        held = hvd.elastic.TorchState(layer, epoch=1)
        held.sync()
    assert held.epoch == 9
    held.epoch = 10
    nn.init.constant_(layer.weight, 6.0)
    held.restore()
    assert (held.epoch, layer.weight.unique().item()) == (9, 5.0)


def test_handlers_can_be_added_for_other_kinds_of_values() -> None:
    class Counter:
        count = 0

    class CounterHandler(elastic.StateHandler):
        saved = 0

        def save(self) -> None:
            self.saved = self.value.count

        def restore(self) -> None:
            self.value.count = self.saved

    before = elastic.get_handler_registry()
    registry = [*before, (Counter, CounterHandler)]
    elastic.set_handler_registry(registry)
    try:
        assert elastic.get_handler_registry() is registry
        held = hvd.elastic.TorchState(counter=Counter())
        held.counter.count = 2
        held.restore()
        assert held.counter.count == 0
    finally:
        elastic.set_handler_registry(before)


def ranks_of(size: int, **options: Any) -> list[elastic.ElasticSampler]:
    """Return the samplers of all ranks of a job."""
    found = []
    for rank in range(size):
        with (
            mock.patch("dualdist.hvd.elastic.rank", return_value=rank),
            mock.patch("dualdist.hvd.elastic.size", return_value=size),
        ):
            found.append(elastic.ElasticSampler(**options))
    return found


@pytest.mark.parametrize(("count", "size"), [(8, 2), (10, 4), (3, 4), (1, 4), (0, 2), (7, 1)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_samples_are_shared_out_as_many_to_each_rank(count: int, size: int, shuffle: bool) -> None:
    shares = [list(each) for each in ranks_of(size, dataset=range(count), shuffle=shuffle)]
    each = -(-count // size)
    assert [len(share) for share in shares] == [each] * size
    assert {index for share in shares for index in share} == set(range(count))
    if not shuffle and count:
        assert [shares[number % size][number // size] for number in range(size * each)][:count] == list(range(count))


def test_a_sampler_has_another_order_for_each_epoch_and_is_restored_with_its_state() -> None:
    (one,), (other,) = ranks_of(1, dataset=range(50), seed=3), ranks_of(1, dataset=range(50), seed=4)
    first = list(one)
    assert first == list(one)
    one.set_epoch(1)
    assert list(one) == list(other), "epoch 1 of seed 3 and epoch 0 of seed 4, as Horovod has it"
    assert list(one) != first
    each = elastic.ElasticSampler(range(8))
    held = hvd.elastic.TorchState(sampler=each)
    each.record_batch(0, 2)
    held.commit()
    each.record_batch(1, 2)
    held.restore()
    assert (each.processed_num, len(each)) == (2, 6)
    each.set_epoch(1)
    assert (each.epoch, each.processed_num, len(each)) == (1, 0, 8)


def test_processed_samples_are_left_out_for_any_number_of_ranks() -> None:
    many = ranks_of(4, dataset=range(40))
    done: set[int] = set()
    for each in many:
        done |= set(list(each)[:6])
        each.record_batch(0, 4)
        each.record_batch(1, 2)
        assert each.processed_num == 24
        assert len(each) == 10, "shared out anew at a reset only"
    for each in ranks_of(2, dataset=range(40)):
        with mock.patch("dualdist.hvd.elastic.size", return_value=2):
            each.load_state_dict(many[0].state_dict())
        assert len(each) == 8
        assert not done & set(each)


def test_remaining_samples_are_shared_out_again_after_hosts_were_removed() -> None:
    """No sync() follows then, and the commit does not change. Shares at the start, after the reset, after a failure."""
    with mock.patch("dualdist.hvd.elastic.size", return_value=2) as size:
        each = elastic.ElasticSampler(range(8), shuffle=False)
        shares = []

        def train(held: Any) -> None:
            shares.append(list(each))
            if len(shares) == 1:
                each.record_batch(0, 1)
                held.commit()
                each.record_batch(1, 1)
                raise HostsUpdatedInterrupt(skip_sync=True)
            each.record_batch(0, 2)
            held.restore()
            shares.append(list(each))

        held = hvd.elastic.TorchState(sampler=each, batch=0)
        elastic.run_fn(train, lambda: setattr(size, "return_value", 1))(held)
    assert shares == [[0, 2, 4, 6], [4, 5, 6, 7], [2, 3, 4, 5, 6, 7]]


class Plain(State):
    def __init__(self) -> None:
        super().__init__(bcast_object=lambda obj: obj, get_rank=lambda: 0)
        self.calls: list[str] = []
        for name in ("save", "restore", "sync", "reset"):
            setattr(self, name, partial(self.calls.append, name))


def failing(errors: list[Exception]) -> Callable[..., str]:
    def train(held: Plain, word: str) -> str:
        held.calls.append("train")
        if errors:
            raise errors.pop(0)
        return word

    return train


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (HorovodInternalError("a rank is gone"), ["restore", "again", "reset", "callback", "sync"]),
        (CollectiveError("a rank is gone"), ["restore", "again", "reset", "callback", "sync"]),
        (HostsUpdatedInterrupt(skip_sync=False), ["again", "reset", "callback", "sync"]),
        (HostsUpdatedInterrupt(skip_sync=True), ["again", "reset", "callback"]),
    ],
    ids=["internal error", "collective error", "hosts updated", "hosts removed"],
)
def test_the_function_runs_again_after_failures_and_changed_hosts(
    error: Exception, calls: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    held = Plain()
    held.register_reset_callbacks([lambda: held.calls.append("callback")])
    run = elastic.run_fn(failing([error]), lambda: held.calls.append("again"))
    assert run.__name__ == "train"
    assert run(held, word="done") == "done"
    assert held.calls == ["sync", "train", *calls, "train"]
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"dualdist: (a rank is gone|hosts .*); the remaining ranks initialize again", line)


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        KeyError("mine"),
        MismatchError("3 elements and 4"),
        caused_by(HorovodInternalError("3 elements and 4"), MismatchError("3 elements and 4")),
    ],
    ids=["the program's", "a mismatch", "Horovod's of a mismatch"],
)
def test_another_error_ends_the_function(error: Exception) -> None:
    """So does a mismatch between ranks, which a reset does not change."""
    held = Plain()
    with pytest.raises(type(error)):
        elastic.run_fn(failing([error]), lambda: held.calls.append("again"))(held, "word")
    assert held.calls == ["sync", "train"]
    notification_manager.handle_hosts_updated(1.0, HostUpdateResult.added)
    held.check_host_updates()


@pytest.mark.parametrize(("update", "skip_sync"), [("added", False), ("removed", True), ("mixed", False)])
def test_changed_hosts_interrupt_the_next_commit_once(update: str, skip_sync: bool) -> None:
    held = Plain()
    held.commit()
    notification_manager.register_listener(held)
    notification_manager.handle_hosts_updated(1.0, HostUpdateResult[update])
    with pytest.raises(HostsUpdatedInterrupt) as interrupt:
        held.commit()
    assert interrupt.value.skip_sync is skip_sync
    held.commit()
    notification_manager.handle_hosts_updated(1.0, HostUpdateResult[update])
    held.check_host_updates()
    notification_manager.remove_listener(held)


def test_hosts_that_change_during_a_reset_cause_another_one() -> None:
    """Earlier changes are known to the rendezvous; a host that comes meanwhile may have come too late."""
    held = Plain()
    seen = []

    def train(state: Plain) -> None:
        seen.append("begins")
        if len(seen) == 1:
            state.on_hosts_updated(1.0, HostUpdateResult.added)
            raise HorovodInternalError("a rank was lost")
        state.check_host_updates()

    def reset() -> None:
        seen.append("meets")
        if len(seen) == 2:
            held.on_hosts_updated(2.0, HostUpdateResult.added)

    elastic.run_fn(train, reset)(held)
    assert seen == ["begins", "meets", "begins", "meets", "begins"]
