"""Names that are private to torch: each is used in one file, and is there in the installed torch.

A new torch may take any of them away. The first test then names the file, and what it needs the name for.
"""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dualdist

PACKAGE = Path(dualdist.__file__).parent
MOVED = f"torch {torch.__version__} has moved this (tried with 2.13 and 2.15): find what took its place, in one file"
# The full name: the file that uses it, and what for.
NAMES = {
    "torch._C._current_graph_task_id": ("ddp/packer.py", "to tell backwards apart"),
    "torch._C._functorch.is_functorch_wrapped_tensor": ("collectives/tensor_utils.py", "to refuse those of torch.func"),
    "torch._C._functorch.peek_interpreter_stack": ("collectives/dynamo.py", "to find a transformation of torch.func"),
    "torch._C._DisableFuncTorch": ("collectives/dynamo.py", "to make buffers outside of it"),
    "torch.autograd.forward_ad._current_level": ("collectives/tensor_utils.py", "to refuse dual tensors"),
    "torch._C._distributed_c10d": ("c10d/process_group.py", "to define a process group"),
    "torch._C._distributed_c10d.AllgatherOptions": ("backends/native/backend.py", "to give an allgather its timeout"),
    "torch._higher_order_ops.effects": ("collectives/traced_allreduce.py", "to keep what has no used result"),
    "torch._dynamo.eval_frame.skip_code": ("collectives/dynamo.py", "to spare compiling; done without where missing"),
    "torch.autograd.Variable._execution_engine.queue_callback": ("ddp/reducer.py", "to reduce at a backward's end"),
    "torch.autograd.graph._engine_run_backward.__code__": ("ddp/reducer.py", "to see a backward inside of another"),
    "torch.distributed.Backend._plugins": ("backends/native/libraries.py", "to create another package's group"),
    "torch.distributed.distributed_c10d._get_default_store": ("backends/native/startup.py", "for a program's store"),
    "torch.optim.Optimizer.profile_hook_step.__code__": ("collectives/broadcast_state.py", "to see steps"),
    "torch.nn.modules.batchnorm._BatchNorm": ("ddp/sync_batch_norm.py", "to be a batch norm, as torch's own is"),
    "torch.utils.data._utils.worker": ("data/loader.py", "to hide a worker from the data set in it"),
}
# Attributes of objects, which no search finds: the file, and how to look for the attribute.
ATTRIBUTES: dict[str, tuple[str, Callable[[], object]]] = {
    "_optimizer_step_post_hooks": ("ddp/optimizer.py", lambda: torch.optim.SGD([torch.ones(1)])),
    "_optimizer_step_pre_hooks": ("ddp/sharding.py", lambda: torch.optim.SGD([torch.ones(1)])),
    "_allgather_base": ("backends/native/backend.py", lambda: dist.ProcessGroupGloo),
    "_device_types": ("backends/native/startup.py", lambda: dist.ProcessGroup),
    "_timeout": ("backends/native/libraries.py", lambda: dist.ProcessGroupNCCL.Options()),
    "_worker_info": ("data/loader.py", lambda: torch.utils.data._utils.worker),
    "_orig_mod": ("checkpoint/state.py", lambda: torch.compile(nn.Linear(1, 1))),
    "_load_from_state_dict": ("checkpoint/state.py", lambda: nn.Linear(1, 1)),
    "_save_to_state_dict": ("checkpoint/state.py", lambda: nn.Linear(1, 1)),
    "_state_dict_pre_hooks": ("checkpoint/state.py", lambda: nn.Linear(1, 1)),
    "_state_dict_hooks": ("checkpoint/state.py", lambda: nn.Linear(1, 1)),
    "_load_state_dict_pre_hooks": ("checkpoint/state.py", lambda: nn.Linear(1, 1)),
    "_load_state_dict_post_hooks": ("checkpoint/state.py", lambda: nn.Linear(1, 1)),
    "_values": ("ddp/nonfinite.py", lambda: torch.ones(1)),
    "_nnz": ("collectives/reductions.py", lambda: torch.ones(1)),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_there(name: str) -> None:
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError) as error:
        pytest.fail(f"{MOVED}: dualdist/{NAMES[name][0]} uses {name} {NAMES[name][1]} ({error})")


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_private_attribute_is_there(name: str) -> None:
    file, make = ATTRIBUTES[name]
    if name == "_timeout" and not dist.is_nccl_available():
        pytest.skip("torch was built without NCCL")
    assert hasattr(make(), name), f"{MOVED}: dualdist/{file} uses {name}"
    assert f".{name}" in (PACKAGE / file).read_text()


def private_names(path: Path) -> Iterator[str]:
    """Yield the full names in a file that begin with torch and have a private part; of longer ones only these."""
    tree = ast.parse(path.read_text())
    known = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {alias.asname: alias.name for alias in node.names if alias.asname}
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            known |= names
            yield from names.values()
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            words = ast.unparse(node).split(".")
            yield ".".join([known.get(words[0], words[0]), *words[1:]])


def is_private(name: str) -> bool:
    """Return True for a private name of torch; torch._foreach_* are in its documentation."""
    words = name.split(".")
    private = [word for word in words if word.startswith("_") and not word.startswith(("__", "_foreach_"))]
    return words[0] == "torch" and "(" not in name and "WORLD" not in words and bool(private)


def test_each_private_name_is_used_in_its_file_alone() -> None:
    """Of a listed name, or of what is in it, or of what it is in."""
    strangers = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        own = [name for name, (where, _) in NAMES.items() if where == file]
        for name in filter(is_private, private_names(path)):
            if not any(f"{name}.".startswith(f"{each}.") or f"{each}.".startswith(f"{name}.") for each in own):
                strangers.append(f"{file}: {name}")
    assert strangers == [], "private to torch: take a public way, or use it in one file and add it here"


EAGER = """
import sys, torch
import dualdist as dd
dd.init()
weight = torch.nn.Parameter(torch.ones(3))
optimizer = dd.wrap_optimizer(torch.optim.AdamW([weight]))
weight.sum().backward()
optimizer.step()
dd.allreduce(torch.ones(1))
assert "torch._dynamo.eval_frame" not in sys.modules
"""


def test_nothing_of_ours_loads_the_compiler_where_nothing_is_compiled(base_env: Mapping[str, str]) -> None:
    """torch's optimizers would; harness/startup spares programs of tests these 2 CPU seconds a rank."""
    subprocess.run([sys.executable, "-c", EAGER], env=dict(base_env), check=True, timeout=120)
