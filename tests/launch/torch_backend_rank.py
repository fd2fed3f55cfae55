"""A rank of a program of torch.distributed over init_process_group("dualdist"), held against Gloo and plain torch.

    torch_backend_rank.py REFUSED

It runs the laws that the tests ask for, and knows nothing of dualdist but the backend's name. REFUSED are words of the
error of what the transport does not have, as send and recv on Horovod.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from harness.rank_pool import serve
from launch.torch_program import ToyModel, train
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel as DDP

import dualdist.c10d

GROUP_TIMEOUT = timedelta(seconds=40)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)
LAWS: dict[str, Callable[[], None]] = {}


def law(function: Callable[[], None]) -> Callable[[], None]:
    LAWS[function.__name__] = function
    return function


def raises(call: Callable[[], object], *words: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011  all words are looked for
        call()
    assert all(word in str(caught.value) for word in words), f"{caught.value!r} lacks one of {words}"


def drawn(rank: int, dtype: torch.dtype = torch.float32, shape: Sequence[int] = (5, 3)) -> torch.Tensor:
    """The tensor of a rank: small whole numbers, of which all sums and products are exact."""
    return torch.randint(1, 4, tuple(shape), generator=torch.Generator().manual_seed(rank)).to(dtype)


def ranks() -> range:
    return range(dist.get_world_size())


def me() -> int:
    return dist.get_rank()


@law
def an_allreduce_is_exact_in_every_dtype_and_op() -> None:
    for dtype in DTYPES:
        everyone = torch.stack([drawn(rank, dtype).double() for rank in ranks()])
        totals = (everyone.sum(0), everyone.amin(0), everyone.amax(0), everyone.prod(0))
        for op, total in zip(OPS, totals, strict=True):
            tensor = drawn(me(), dtype)
            dist.all_reduce(tensor, op)
            assert torch.equal(tensor, total.to(dtype)), f"{op} of {dtype}"
    mean, transposed = drawn(me()), drawn(me()).t()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    torch.testing.assert_close(mean, sum(map(drawn, ranks())) / len(ranks()))
    dist.all_reduce(transposed)
    assert torch.equal(transposed, sum(map(drawn, ranks())).t())
    bits = torch.tensor([1 << me(), 5])
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    assert bits.tolist() == [(1 << len(ranks())) - 1, 5]
    sparse = torch.sparse_coo_tensor([[me(), 7]], [1.0, 2.0], (8,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [float(index in ranks()) for index in range(7)] + [2.0 * len(ranks())]


@law
def tensors_move_to_where_they_belong() -> None:
    size = len(ranks())
    last = size - 1
    tensor = drawn(me())
    dist.broadcast(tensor, last)
    assert torch.equal(tensor, drawn(last))
    listed = [torch.empty(5, 3) for _ in ranks()]
    dist.all_gather(listed, drawn(me()))
    assert all(torch.equal(found, drawn(rank)) for rank, found in enumerate(listed))
    joined = torch.empty(size * 5, 3)
    dist.all_gather_into_tensor(joined, drawn(me()))
    assert torch.equal(joined, torch.cat([drawn(rank) for rank in ranks()]))
    gathered = [torch.empty(5, 3) for _ in ranks()] if me() == last else None
    dist.gather(drawn(me()), gathered, last)
    assert gathered is None or all(torch.equal(found, drawn(rank)) for rank, found in enumerate(gathered))
    mine = torch.empty(5, 3)
    dist.scatter(mine, [drawn(10 + rank) for rank in ranks()] if me() == 0 else None, 0)
    assert torch.equal(mine, drawn(10 + me()))
    total = drawn(me())
    dist.reduce(total, 0)
    assert torch.equal(total, sum(map(drawn, ranks())) if me() == 0 else drawn(me()))
    swapped = [torch.empty(5, 3) for _ in ranks()]
    dist.all_to_all(swapped, [drawn(10 * me() + rank) for rank in ranks()])
    assert all(torch.equal(found, drawn(10 * rank + me())) for rank, found in enumerate(swapped))
    sent = torch.cat([torch.full((rank + 1, 2), 10.0 * me() + rank) for rank in ranks()])
    received = torch.empty(size * (me() + 1), 2)
    dist.all_to_all_single(received, sent, [me() + 1] * size, [rank + 1 for rank in ranks()])
    assert received[:: me() + 1, 0].tolist() == [10.0 * rank + me() for rank in ranks()]


@law
def a_reduce_scatter_is_a_part_of_the_allreduce() -> None:
    size = len(ranks())
    whole = sum(drawn(rank, shape=(size * 2, 3)) for rank in ranks())
    own, listed = torch.empty(2, 3), torch.empty(2, 3)
    dist.reduce_scatter_tensor(own, drawn(me(), shape=(size * 2, 3)))
    dist.reduce_scatter(listed, list(drawn(me(), shape=(size * 2, 3)).chunk(size)))
    assert torch.equal(own, whole.chunk(size)[me()])
    assert torch.equal(listed, own)


@law
def inputs_stay_as_they_are() -> None:
    size = len(ranks())
    given = drawn(me(), shape=(size, 2))
    dist.reduce_scatter_tensor(torch.empty(1, 2), given)
    dist.all_gather_into_tensor(torch.empty(size * size, 2), given)
    dist.all_to_all_single(torch.empty(size, 2), given)
    assert torch.equal(given, drawn(me(), shape=(size, 2)))


@law
def async_operations_end_in_order_and_complete_futures() -> None:
    tensors = [drawn(me() + number) for number in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    doubled = works[7].get_future().then(lambda future: future.value()[0] * 2)
    works[19].wait()
    assert all(work.is_completed() and work.is_success() for work in works)
    for number, tensor in enumerate(tensors):
        assert torch.equal(tensor, sum(drawn(rank + number) for rank in ranks()))
    assert torch.equal(doubled.wait(), tensors[7] * 2)
    if me() == 0:
        late = dist.all_reduce(torch.ones(2), async_op=True)
        time.sleep(0.5)  # a rank that computes: the others need not wait for its wait()
        dist.barrier()
        late.wait()
    else:
        dist.all_reduce(torch.ones(2))
        dist.barrier()


@law
def a_callback_may_wait_for_another_operation() -> None:
    """As those of torch's hooks for PowerSGD and quantization do."""
    square = float(len(ranks()) ** 2)
    for add in (
        lambda total: dist.all_reduce(total, async_op=True).get_future().wait(),
        lambda total: dist.all_reduce(total, async_op=True).wait(),
        dist.all_reduce,
    ):
        for waits in (True, False):  # it is called in this thread, or in the background
            tensor, called = torch.ones(3), []
            work = dist.all_reduce(tensor, async_op=True)
            after = work.get_future().then(lambda future, add=add, called=called: called.append(add(future.value()[0])))
            if waits:
                work.wait()
            after.wait()
            assert len(called) == 1
            assert tensor.tolist() == [square] * 3


@law
def buckets_of_powersgd_send_in_one_order_on_all_ranks() -> None:
    """Its callbacks begin operations; on Gloo, this hangs (torch 2.13)."""
    torch.manual_seed(7)
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    model = DDP(torch.nn.Sequential(*layers), bucket_cap_mb=0.02)
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5)
    model.register_comm_hook(state, powerSGD_hook)
    generator = torch.Generator().manual_seed(me())
    for step in range(6):
        if step % len(ranks()) == me():
            time.sleep(0.02)  # so that ranks come to a bucket in turn first
        model(torch.randn(4, 64, generator=generator)).square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        listed = [torch.empty_like(parameter) for _ in ranks()]
        dist.all_gather(listed, parameter.grad)
        assert all(torch.equal(each, listed[0]) for each in listed)


@law
def objects_and_coalesced_and_functional_operations_work() -> None:
    listed: list[object] = [None for _ in ranks()]
    dist.all_gather_object(listed, {"rank": me()})
    assert listed == [{"rank": rank} for rank in ranks()]
    told: list[object] = [me(), "x" * 5000 if me() == 0 else None]
    dist.broadcast_object_list(told, 0)
    assert told == [0, "x" * 5000]
    tensors = [drawn(me()), drawn(me() + 1)]
    with dist._coalescing_manager(async_ops=True) as coalesced:
        for tensor in tensors:
            dist.all_reduce(tensor)
    coalesced.wait()
    assert torch.equal(tensors[1], sum(drawn(rank + 1) for rank in ranks()))
    assert torch.equal(functional.all_reduce(drawn(me()), "sum", dist.group.WORLD) + 0, sum(map(drawn, ranks())))
    unwaited = functional.all_reduce(torch.ones(2, 3), "sum", dist.group.WORLD)
    dist.all_reduce(unwaited)
    assert unwaited.tolist() == [[len(ranks()) ** 2.0] * 3] * 2
    unwaited = functional.all_reduce(torch.ones(2, 3), "sum", dist.group.WORLD)
    dist.broadcast(unwaited, 0)
    assert unwaited.tolist() == [[float(len(ranks()))] * 3] * 2
    found = functional.all_gather_tensor(drawn(me()), 0, dist.group.WORLD)
    assert torch.equal(found + 0, torch.cat([drawn(rank) for rank in ranks()]))


@law
def dtensors_are_resharded() -> None:
    mesh = init_device_mesh("cpu", (len(ranks()),))
    whole = torch.arange(len(ranks()) * 6.0).view(-1, 2)
    sharded = DTensor.from_local(whole.chunk(len(ranks()))[me()], mesh, [Shard(0)])
    assert torch.equal(sharded.redistribute(placements=[Replicate()]).to_local(), whole)
    partial = sharded.sum()
    assert partial.full_tensor().item() == whole.sum().item()


@law
def peers_send_and_receive_or_are_refused() -> None:
    if REFUSED:
        raises(lambda: dist.send(torch.ones(1), (me() + 1) % len(ranks())), REFUSED)
        return
    right, left = (me() + 1) % len(ranks()), (me() - 1) % len(ranks())
    received, by_tag = torch.empty(5, 3), torch.empty(3, 5).t()
    sends = [dist.isend(drawn(me()), right, tag=1), dist.isend(drawn(me() + 50), right, tag=2)]
    dist.recv(by_tag, left, tag=2)
    assert dist.recv(received, tag=1) == left
    for work in sends:
        work.wait()
    assert torch.equal(received, drawn(left))
    assert torch.equal(by_tag, drawn(left + 50))
    large = torch.full((300_000,), float(me()))
    into = torch.empty(300_000)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, into, left), dist.P2POp(dist.isend, large, right)]):
        work.wait()
    assert into.unique().tolist() == [float(left)]


@law
def a_subgroup_needs_its_members_alone_or_is_refused() -> None:
    members = list(ranks())[1:]
    if REFUSED:
        if me() in members:
            raises(lambda: dist.new_group(members, use_local_synchronization=True), "all ranks", "DUALDIST_BACKEND")
        dist.barrier()
        return
    # torch 2.15 numbers groups differently on each rank after groups of some: the next group of all hangs with Gloo.
    is_local = torch.__version__ < (2, 15)
    group = None
    if me() in members or not is_local:
        group = dist.new_group(members, use_local_synchronization=is_local)
    if me() in members:
        tensor = drawn(me())
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, sum(drawn(rank) for rank in members))
        dist.broadcast(tensor, members[-1], group=group)
        dist.barrier(group)
        dist.destroy_process_group(group)
    for _ in range(2 * (is_local and me() in members)):  # torch gives it the same name each time
        dist.destroy_process_group(dist.new_group(members, use_local_synchronization=True))
    same = dist.new_group()
    world, again = drawn(me()), drawn(me())
    works = [dist.all_reduce(world, async_op=True), dist.all_reduce(again, group=same, async_op=True)]
    for work in works[::-1] if me() else works:  # groups do not wait for one another
        work.wait()
    assert torch.equal(world, again)
    dist.barrier()
    dist.destroy_process_group(same)


def sharded_by(mesh: DeviceMesh, model: ToyModel) -> ToyModel:
    for layer in (model.net1, model.net2, model):
        fully_shard(layer, mesh=mesh)
    return model


def trained(make: Callable[[ToyModel], torch.nn.Module]) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model = make(ToyModel())
    train(model)
    values = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.state_dict().values()]
    return [each.detach().clone() for each in values]


@law
def ddp_and_fsdp_end_with_the_bits_of_gloo_at_two_ranks() -> None:
    """With more, the order of the sums differs: 1e-5 is far above the rounding of a few steps."""
    gloo, ours = dist.new_group(backend="gloo"), dist.group.WORLD
    meshes = [DeviceMesh.from_group(group, "cpu") for group in (gloo, ours)]
    for make in (
        lambda index: lambda model: DDP(model, process_group=(gloo, ours)[index]),
        lambda index: lambda model: DDP(model, process_group=(gloo, ours)[index], gradient_as_bucket_view=True),
        lambda index: lambda model: sharded_by(meshes[index], model),
    ):
        for expected, found in zip(trained(make(0)), trained(make(1)), strict=True):
            if len(ranks()) == 2:
                assert torch.equal(expected, found)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    dist.barrier()
    dist.destroy_process_group(gloo)


@law
def a_sharded_optimizer_and_a_checkpoint_work() -> None:
    torch.manual_seed(7)
    model = ToyModel()
    replicated = DDP(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
    replicated(torch.ones(4, 10)).sum().backward()
    optimizer.step()
    folder: list[object] = [tempfile.mkdtemp() if me() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    sharded = sharded_by(init_device_mesh("cpu", (len(ranks()),)), model)
    dcp.save({"model": sharded.state_dict()}, checkpoint_id=str(folder[0]))
    other = sharded_by(init_device_mesh("cpu", (len(ranks()),)), ToyModel())
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=str(folder[0]))
    other.load_state_dict(state["model"])
    for expected, found in zip(sharded.parameters(), other.parameters(), strict=True):
        assert torch.equal(expected.to_local(), found.to_local())
    dist.barrier()
    if me() == 0:
        shutil.rmtree(str(folder[0]))


@law
def what_it_does_not_move_is_refused_by_name() -> None:
    raises(lambda: dist.all_reduce(torch.ones(2, device="meta")), "CPU tensors, not meta")
    raises(lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), dist.ReduceOp.AVG), "average", "int64")
    raises(lambda: dist.all_gather_into_tensor(torch.empty(3), torch.ones(2)), "into 3")
    raises(lambda: dist.all_gather([torch.empty(3) for _ in ranks()], torch.ones(2)), "8 bytes each", "12")
    raises(lambda: dist.all_gather([torch.empty(2)], torch.ones(2)), f"on {len(ranks())} ranks", "[8]")
    raises(lambda: dist.broadcast(torch.ones(2), 9), "rank 9 of a group", f"0 to {len(ranks()) - 1}")
    raises(lambda: dist.broadcast(torch.sparse_coo_tensor([[0]], [1.0], (8,)), 0), "sparse", "to_dense()")
    mesh = init_device_mesh("cpu", (len(ranks()),))
    sharded = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    raises(lambda: dist.all_reduce(sharded), "DTensor", "to_local()")
    narrow = torch.empty(2 * len(ranks()), dtype=torch.float16)
    raises(lambda: dist.all_gather_into_tensor(narrow, torch.ones(2)), "float32", "into", "float16")


@law
def the_limit_of_one_thread_leaves_what_another_one_began_before() -> None:
    """Its group is out of step afterwards."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    given = torch.full((2,), 1.0 + me())
    if me() == 0:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=1.5)
        work = dist.all_reduce(given, group=group, async_op=True)
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(lambda: raises(group.allreduce([torch.ones(2)], options).wait, "of 1.5 s has passed"))
            work.wait()
            late.result()
    else:
        time.sleep(3)
        dist.all_reduce(given, group=group)
    assert given.tolist() == [sum(rank + 1.0 for rank in ranks())] * 2


@law
def a_late_rank_is_named() -> None:
    """Its group is out of step afterwards."""
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    if me() == 0:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        late = "rank 1 did" if len(ranks()) == 2 else "ranks 1, 2 did"
        raises(work.wait, "the timeout of 1.5 s has passed", "allreduce", late, "float32(2,)")
        raises(lambda: dist.all_reduce(torch.ones(2), group=group), "out of step")
    else:
        time.sleep(6)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"late/{me()}", "")
    store.wait([f"late/{rank}" for rank in ranks()])


def run(name: str) -> object:
    if name == "laws":
        return list(LAWS)
    LAWS[name]()
    return None


if __name__ == "__main__":
    REFUSED = sys.argv[1] if len(sys.argv) > 1 else ""
    torch.set_num_threads(1)
    dist.init_process_group(dualdist.c10d.NAME, timeout=GROUP_TIMEOUT)
    serve(me(), run)
    dist.destroy_process_group()
