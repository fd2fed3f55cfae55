"""dualdist.hvd beside its optimizer: collectives, functions, process sets, the timeline, init with some ranks."""

import json
import os
import tempfile
from pathlib import Path

import torch
from contract.adasum_laws import PAIRS
from contract.oracle import law, law_alone, loss_of, net, raises, ranks
from torch import nn

import dualdist as dd
from dualdist import hvd


@law
def hvd_averages_integers_like_horovod() -> None:
    hvd.init()
    mine = torch.tensor([dd.rank() + 3, -dd.rank() - 3, 7])
    totals = [sum(rank + 3 for rank in ranks()), -sum(rank + 3 for rank in ranks()), 7 * dd.size()]
    for dtype in (torch.int32, torch.int64, torch.uint8)[: 3 if mine.min() >= 0 else 2]:
        given = mine.to(dtype)
        assert hvd.allreduce(given).tolist() == [int(total / dd.size()) for total in totals], "cut off towards zero"
        assert hvd.allreduce(given, op=hvd.Sum).tolist() == totals
    assert hvd.reducescatter(torch.full((dd.size(),), 5), op=hvd.Average).tolist() == [5]
    lone = torch.tensor([1 if dd.rank() == 0 else 0])
    assert hvd.allreduce(lone, postscale_factor=dd.size() + 0.5).item() == 1, "cut off once, after both"
    sparse = mine.to_sparse()
    assert hvd.allreduce(sparse).to_dense().tolist() == [int(total / dd.size()) for total in totals]
    assert hvd.sparse_allreduce_async(sparse, "a", hvd.Average)().to_dense().tolist()[2] == 7
    assert hvd.allreduce(mine, average=0).tolist() == hvd.allreduce(mine, op=hvd.Sum).tolist(), "a flag of 0"
    raises(ValueError, lambda: hvd.allreduce(mine, average=True, op=hvd.Sum), "average")
    raises(ValueError, lambda: hvd.allreduce(mine, op=17), "op=17")


@law
def hvd_collectives_return_values_blocking_and_async() -> None:
    hvd.init()
    size, rank = dd.size(), dd.rank()
    x = torch.full((3,), float(rank + 1))
    total = float(sum(r + 1 for r in ranks()))
    for handle, expected in (
        (hvd.allreduce_async(x, op=hvd.Sum, name="a"), total),
        (hvd.allreduce_async(x, name="b", prescale_factor=2.0), 2 * total / size),
        (hvd.allreduce_async(x, op=hvd.Max, name="c"), float(size)),
        (hvd.broadcast_async(x, size - 1, name="d"), float(size)),
    ):
        while not hvd.poll(handle):
            pass
        assert torch.allclose(hvd.synchronize(handle), torch.full((3,), expected))
        assert hvd.synchronize(handle) is None
        raises(ValueError, lambda handle=handle: hvd.poll(handle), "handle")
    assert x.tolist() == [float(rank + 1)] * 3
    in_place = x.clone()
    assert hvd.allreduce_(in_place, op=hvd.Sum) is in_place
    assert in_place.tolist() == [total] * 3
    grouped = hvd.grouped_allreduce([x, x.double()], op=hvd.Product)
    assert isinstance(grouped, list)
    assert isinstance(hvd.synchronize(hvd.grouped_allreduce_async([x], name="e")), tuple)
    splits = [r + 1 for r in ranks()]
    rows = torch.full((sum(splits),), rank, dtype=torch.int16)
    found, received = hvd.alltoall(rows, splits=torch.tensor(splits, dtype=torch.int32))
    assert found.tolist() == [r for r in ranks() for _ in range(rank + 1)]
    assert (received.tolist(), received.dtype) == ([rank + 1] * size, torch.int32)
    assert isinstance(hvd.alltoall(torch.zeros(size)), torch.Tensor)
    assert hvd.allgather(torch.tensor([[rank]])).tolist() == [[r] for r in ranks()]
    sparse = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1), (size,), check_invariants=True)
    assert hvd.sparse_allreduce_async(sparse, "f", hvd.Sum)().to_dense().tolist() == [1.0] * size
    refused = [(17, "op=17"), (None, "op=None")]
    if size in PAIRS:  # else Adasum itself is
        refused.append((hvd.Adasum, "sparse tensors are reduced by"))
    for op, words in refused:
        raises(ValueError, lambda op=op: hvd.sparse_allreduce_async(sparse, "g", op), words)
    half = hvd.allreduce(torch.full((2,), 0.1), compression=hvd.Compression.fp16, op=hvd.Sum)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, torch.full((2,), 0.1 * size), rtol=2e-3, atol=2e-3)
    hvd.barrier()
    if size > 1:
        raises(hvd.HorovodInternalError, lambda: hvd.allreduce(torch.ones(2 + rank % 2)), "(2,)", "(3,)")
        raises(hvd.HorovodInternalError, lambda: hvd.broadcast(x, rank), "root 0", "root 1")


@law
def hvd_reports_ranks_and_builds() -> None:
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (dd.rank(), dd.size())
    assert (hvd.local_rank(), hvd.local_size()) == (dd.local_rank(), dd.local_size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_initialized()
    assert hvd.mpi_ops.is_homogeneous()
    assert hvd.mpi_enabled() == (dd.transport() == "mpi")
    assert hvd.gloo_enabled() == (dd.transport() != "mpi")
    assert hvd.gloo_built() == (dd.backend() in ("native", "horovod"))
    if hvd.mpi_enabled():
        assert hvd.mpi_threads_supported()
    else:
        raises(ValueError, hvd.mpi_threads_supported, "MPI")
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == (0, 1, 2, 3, 4, 5)


@law
def hvd_broadcast_functions_accept_what_scripts_pass() -> None:
    hvd.init()
    torch.manual_seed(dd.rank())
    model = nn.Linear(3, 2)
    root = torch.manual_seed(0) and nn.Linear(3, 2)
    for params in (model.state_dict(), list(model.named_parameters()), list(model.parameters())):
        with torch.no_grad():
            model.weight.add_(dd.rank())
        hvd.broadcast_parameters(params, root_rank=0)
        assert len({str(weight) for weight in dd.allgather_object(model.weight.tolist())}) == 1
    assert model.weight.shape == root.weight.shape
    hvd.broadcast_parameters(model.named_parameters(), 0)
    raises(ValueError, lambda: hvd.broadcast_parameters(3, 0), "int")  # type: ignore[arg-type]
    before = model.weight.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (dd.rank() + 1))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert torch.equal(model.weight, before), "a fresh Adam leaves the weights alone"
    assert model.weight.grad is not None
    assert not model.weight.grad.any(), "of zeros, as after Horovod's own"
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not optimizer.state
    lambdas = hvd.allgather_object({"rank": dd.rank()}, name="objects")
    assert [found["rank"] for found in lambdas] == list(ranks())
    assert hvd.broadcast_object((dd.rank(), None), root_rank=dd.size() - 1) == (dd.size() - 1, None)


@law_alone
def hvd_timeline_shows_collectives_buckets_and_process_sets() -> None:
    """Every row begins and ends equally often, and each bucket is in it once a step."""
    hvd.init(process_sets="dynamic")
    size, steps = dd.size(), 3
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    loss_of(model, dd.rank()).backward()  # before the trace, for the buckets are planned again after the first round
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        hvd.start_timeline(str(path))
        late = hvd.add_process_set([0]) if size > 1 else hvd.global_process_set
        if dd.rank() == 0:
            hvd.allreduce(torch.ones(1), name="late", process_set=late)
        hvd.allreduce(torch.ones(1), name="early")
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, dd.rank(), step).backward()
            optimizer.step()
        hvd.stop_timeline()
        loss_of(model, dd.rank()).backward()
        hvd.allreduce(torch.ones(1), name="afterwards")
        assert path.exists() == (dd.rank() == 0)
        events = json.loads(path.read_text()) if dd.rank() == 0 else []
    names = {event["pid"]: event["args"].get("name") for event in events if event.get("name") == "process_name"}
    rows = [[event for event in events if event["pid"] == pid and event["ph"] in "BE"] for pid in names if pid]
    phases_of = {names[row[0]["pid"]]: [event.get("name", "end") for event in row] for row in rows}
    if dd.rank() == 0:
        waited = ["NEGOTIATE_ALLREDUCE", "end", "ALLREDUCE", "end"]
        assert phases_of["allreduce.late"] == phases_of["allreduce.early"] == waited
        assert "allreduce.afterwards" not in phases_of
        buckets = {name: phases for name, phases in phases_of.items() if name.startswith("allreduce.gradients.")}
        assert buckets, phases_of
        assert all(phases == ["ALLREDUCE", "end"] * steps for phases in buckets.values()), buckets
    assert all([event["ts"] for event in row] == sorted(event["ts"] for event in row) for row in rows)


@law_alone
def hvd_init_with_some_ranks_numbers_them_from_0() -> None:
    """Pairs of ranks form jobs, then all ranks again, with process sets; shutdown ends each of them."""
    backend, rank, size = dd.backend(), dd.rank(), dd.size()
    if backend == "single":
        backend = "native"
    over_mpi = dd.transport() == "mpi"
    was_dynamic = os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") == "1"
    dd.shutdown()
    os.environ["DUALDIST_BACKEND"] = backend
    try:
        pair = sorted({rank, min(rank ^ 1, size - 1)})
        hvd.init(comm=pair)
        assert (hvd.rank(), hvd.size()) == (pair.index(rank), len(pair))
        assert hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum).item() == sum(pair)
        assert hvd.broadcast(torch.tensor([rank]), len(pair) - 1).item() == pair[-1]
        if 0 in pair:  # the ranks of other jobs call none
            hvd.SyncBatchNorm(1)(torch.ones(2, 1))
        assert os.environ["HOROVOD_RANK"] is not None
        assert not torch.distributed.is_initialized(), "the default group is the program's, as with Horovod"
        hvd.shutdown()
        assert not hvd.is_initialized()
        raises(ValueError, hvd.rank, "hvd.init()")
        first, rest = hvd.ProcessSet([0]), hvd.ProcessSet(range(1, size))
        sets = [first, rest] if size > 1 else []
        for _ in range(2):
            hvd.init(process_sets=sets)
            hvd.init()
            mine = hvd.global_process_set if size == 1 else first if rank == 0 else rest
            assert mine.ranks is not None
            assert (mine.included(), mine.size(), mine.rank()) == (True, len(mine.ranks), mine.ranks.index(rank))
            assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=mine).item() == sum(mine.ranks)
            if size > 1:
                other = rest if rank == 0 else first
                assert not other.included()
                raises(ValueError, other.rank, "not in the process set")
                raises(hvd.HorovodInternalError, lambda other=other: hvd.allreduce(torch.ones(1), process_set=other))
                raises(ValueError, lambda: hvd.add_process_set([0]), "HOROVOD_DYNAMIC_PROCESS_SETS=1")
            hvd.shutdown()
            assert first.process_set_id is None
        if size > 2:  # each rank names its own part, as of a communicator that was split
            for given in ([pair, pair], [pair, range(size)], [pair, [0]]):
                sets = [hvd.ProcessSet(members) for members in given]
                if given[-1] == [0]:
                    hvd.init(process_sets=sets)
                    assert sets[0].process_set_id == 1 + rank // 2
                    assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=sets[0]).item() == sum(pair)
                else:
                    raises(ValueError, lambda sets=sets: hvd.init(process_sets=sets), "given twice")
                    assert hvd.is_initialized(), "as Horovod"
                    hvd.shutdown()
            hvd.shutdown()
        hvd.init(process_sets="dynamic")
        assert "HOROVOD_DYNAMIC_PROCESS_SETS" not in os.environ or was_dynamic
        if size > 1:
            added = hvd.add_process_set([0])
            raises(ValueError, lambda: hvd.add_process_set([0]), "already")
            raises(ValueError, lambda: hvd.add_process_set(range(size)), "already")
            assert hvd.remove_process_set(added)
            assert not hvd.remove_process_set(added)
        assert not hvd.remove_process_set(hvd.global_process_set)
        hvd.shutdown()
        hvd.init()
        if not was_dynamic:
            raises(ValueError, lambda: hvd.add_process_set([0]), 'process_sets="dynamic"')
    finally:
        del os.environ["DUALDIST_BACKEND"]
    assert (dd.transport() == "mpi") == over_mpi
