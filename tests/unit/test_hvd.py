"""dualdist.hvd: every public name of Horovod with its signature, `horovod.run`, handles of concurrent collectives."""

import gc
import importlib
import inspect
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import horovod
import pytest
import torch

from dualdist import hvd
from dualdist.collectives import collectives
from dualdist.errors import LaunchError, UsageError
from dualdist.hvd import mpi_ops
from dualdist.hvd.process_sets import current
from dualdist.hvd.run import run

DEFINED = ""
# By module of Horovod: ours, and the names to compare; DEFINED: all that it defines.
MODULES = {
    "horovod.torch": ("dualdist.hvd", DEFINED),
    **{f"horovod.torch.{part}": (f"dualdist.hvd.{part}", DEFINED) for part in ("mpi_ops", "compression", "functions")},
    "horovod.torch.elastic": ("dualdist.hvd.elastic", "ElasticSampler TorchState run"),
    "horovod.torch.elastic.sampler": ("dualdist.hvd.elastic", "ElasticSampler rank size"),
    "horovod.torch.elastic.state": (
        "dualdist.hvd.elastic",
        "ElasticSampler ModelStateHandler ObjectState OptimizerStateHandler SamplerStateHandler StateHandler "
        "TorchState allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters "
        "get_handler_registry set_handler_registry",
    ),
    "horovod.common.elastic": (
        "dualdist.hvd.elastic",
        "HostUpdateResult HostsUpdatedInterrupt ObjectState State WorkerNotificationManager run_fn",
    ),
    "horovod.torch.sync_batch_norm": ("dualdist.hvd.sync_batch_norm", "SyncBatchNorm"),
}
# The compiled extension, and what Horovod's modules import for themselves.
OTHERS = (
    "mpi_lib_v2 mpi_lib HorovodAllgather HorovodAllreduce HorovodAlltoall HorovodBroadcast HorovodGroupedAllgather "
    "HorovodGroupedAllreduce HorovodGroupedReducescatter HorovodReducescatter check_installed_version "
    "get_average_backwards_compatibility_fun gpu_available num_rank_is_power_2 run_fn"
)


def defined_in(module: Any) -> list[str]:
    """Return the public names of Horovod's that the module defines, or, of the package, imports."""
    found = []
    for name, value in vars(module).items():
        owner = getattr(value, "__module__", None) or module.__name__
        is_own = module.__name__ == "horovod.torch" or (owner == module.__name__ and not inspect.ismodule(value))
        if name[0] != "_" and owner.startswith("horovod") and is_own and name not in OTHERS.split():
            found.append(name)
    return found


def signature(function: Any) -> list[tuple[str, Any, Any]]:
    """Return names, kinds and defaults of the parameters, without annotations."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, default(p.default)) for p in parameters]


def default(value: Any) -> Any:
    if inspect.isclass(value) or inspect.ismodule(value) or callable(value):
        return getattr(value, "__name__", type(value).__name__).rpartition(".")[2]
    return value if isinstance(value, (int, float, str, tuple, list, type(None))) else type(value).__name__


def assert_same(theirs: Any, ours: Any, name: str) -> None:
    if inspect.isclass(theirs):
        if "__init__" in vars(theirs) and not name.endswith("Error"):
            assert_same_signature(theirs.__init__, ours.__init__, name)
        for member in (key for key in vars(theirs) if key[0] != "_"):
            assert_same(getattr(theirs, member), getattr(ours, member), f"{name}.{member}")
    elif isinstance(theirs, (int, str)):
        assert ours == theirs, name
    elif callable(theirs):
        assert_same_signature(theirs, ours, name)


def assert_same_signature(theirs: Any, ours: Any, name: str) -> None:
    """Ours may take further, optional arguments: dd.SyncBatchNorm's, and those of horovod.common.util."""
    expected, found = signature(theirs), signature(ours)
    assert found[: len(expected)] == expected, name
    assert name.endswith(("_built", "SyncBatchNorm")) or len(found) == len(expected), name
    assert all(value != "_empty" for _, _, value in found[len(expected) :]), name


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_horovods_signature(module: str) -> None:
    theirs, ours = importlib.import_module(module), importlib.import_module(MODULES[module][0])
    names = MODULES[module][1].split() or defined_in(theirs)
    assert len(names) > 60 or module != "horovod.torch"
    for name in names:
        assert_same(getattr(theirs, name), getattr(ours, name), f"{module}.{name}")
    if module == "horovod.torch":
        assert signature(run) == signature(horovod.run)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_num_proc": 2}, "min_num_proc=2: ranks that come and go"),
        ({"max_np": 2}, "max_np=2: ranks that come and go"),
        ({"reset_limit": 0}, "reset_limit=0"),
        ({"use_mpi": True, "use_gloo": True}, "use_gloo and use_mpi exclude each other"),
        ({"mpi_args": "-x A"}, "mpi_args='-x A': no MPI starts these ranks"),
        ({"output_filename": "out"}, "output_filename='out'"),
        ({"executable": "python2"}, "executable='python2'"),
        ({"hosts": "far:1"}, "'far' is not this host"),
        ({"hosts": "localhost"}, "'localhost' in hosts: expected"),
        ({"hosts": "localhost:2", "num_proc": 3}, "2 slots are too few for num_proc=3"),
        ({"hosts": "localhost:2", "hostfile": "hosts"}, "hostfile='hosts': the ranks run on this host"),
        ({"num_proc": 0}, "nprocs=0"),
    ],
)
def test_an_unsupported_option_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        run(print, **options)


SCRIPT = """\
import sys
import dualdist.hvd.run as running
class Box:
    def __init__(self, value):
        self.value = value
offset = 100
def place(first, last):
    import os
    return Box((int(os.environ["DUALDIST_RANK"]) + offset, first, last))
print("the script runs", flush=True)
boxes = running.run(place, (1,), {"last": 2}, np=3, hosts="localhost:2,127.0.0.1:1", use_gloo=True, verbose=2)
print([box.value for box in boxes], {type(box) is Box for box in boxes}, sys.modules["__main__"].__file__ == __file__)
"""


@pytest.mark.full
def test_results_come_back_in_rank_order_and_the_script_needs_no_guard(
    base_env: Mapping[str, str], tmp_path: Path
) -> None:
    """As with Horovod the ranks do not run the script again; a function and a class of it travel by cloudpickle."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    argv = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(argv, env=dict(base_env), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    results = "[(100, 1, 2), (101, 1, 2), (102, 1, 2)]"
    assert done.stdout.splitlines() == ["the script runs", f"{results} {{True}} True"]


def test_run_takes_np_and_raises_what_a_horovod_program_expects() -> None:
    with pytest.warns(DeprecationWarning, match="num_proc"):
        assert run(abs, (-3,), np=1) == [3]
    with pytest.warns(UserWarning, match="use_mpi=True: .* without MPI"):
        assert run(abs, (-3,), num_proc=1, use_gloo=False, use_mpi=True) == [3]
    with pytest.raises(LaunchError, match=r"rank 0 failed:(.|\n)*ValueError: .*'three'") as caught:
        run(int, ("three",))
    assert isinstance(caught.value, RuntimeError)


@pytest.fixture
def job() -> Iterator[None]:
    with mock.patch.dict(os.environ):  # hvd.init() sets Horovod's variables
        hvd.init()
        yield
        hvd.shutdown()


@pytest.mark.usefixtures("job")
def test_collectives_that_start_concurrently_get_different_handles() -> None:
    """One starts within the start of another, as from another thread."""
    first, second = (collectives.allreduce(current().base, torch.tensor(value), "sum") for value in (1.0, 2.0))
    numbers: list[int] = []

    def start_both() -> Any:
        numbers.append(mpi_ops.start(second))
        return first.start()

    both: Any = SimpleNamespace(start=start_both)
    numbers.append(mpi_ops.start(both))
    assert len({*numbers}) == 2
    assert [hvd.synchronize(number) for number in numbers] == [2.0, 1.0]


@pytest.mark.usefixtures("job")
def test_an_optimizer_that_the_program_drops_is_freed_without_a_garbage_collection() -> None:
    """Its hooks reduce gradients of its parameters, which another optimizer may own by then."""

    def train() -> weakref.ref[torch.optim.Optimizer]:
        model = torch.nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return weakref.ref(hvd.DistributedOptimizer(optimizer))

    torch.optim.SGD([torch.ones(1)])  # torch keeps the frames of a process's first optimizer
    gc.disable()
    try:
        assert train()() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("job")
def test_a_synchronized_layer_is_shown_pickled_and_converted_as_horovods() -> None:
    layer = pickle.loads(pickle.dumps(hvd.SyncBatchNorm(3)))
    assert isinstance(layer, hvd.SyncBatchNorm)
    assert str(layer).startswith("SyncBatchNorm(3, ")
    assert isinstance(hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(3)), hvd.SyncBatchNorm)
