"""torch's own distributed tests on CPUs, on the backend "dualdist" or another one.

    python tests/torch_suite.py --backend gloo --ranks 2 [-k WORDS]
    python tests/torch_suite.py --backend dualdist --ranks 3
    python tests/torch_suite.py --backend dualdist --file TORCH/test/distributed/test_functional_api.py

Without --file these are the tests of collectives and of DDP that torch's wheel ships. FILE is one of torch's source
tree, whose tests of several processes are run; those for GPUs are turned to CPUs. What the tests ask of Gloo alone they
ask of dualdist, too. The ranks of each test are forked, which spares them the import of torch. The last line names the
tests that failed; docs/pages/guides/torch-backend.md has the reasons. torch's tests import expecttest, which is not
among this project's packages.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import tempfile
import types
import unittest
from collections.abc import Callable
from typing import Any

MODULE = "torch.testing._internal.distributed.distributed_test"
TEST_S = "180"
# Conditions on the backend's name -> the same for dualdist as for Gloo.
SAME_AS_GLOO = (
    (r'BACKEND != "gloo"', 'BACKEND not in ("gloo", "dualdist")'),
    (r'BACKEND == "gloo"', 'BACKEND in ("gloo", "dualdist")'),
    (r'require_backend_is_available\(\{"gloo"', 'require_backend_is_available({"dualdist", "gloo"'),
)
# In files of torch's source tree: what is of GPUs -> the same of CPUs.
ON_CPUS = (
    (r"not TEST_CUDA", "False"),
    (r"torch\.accelerator\.current_accelerator\(\)\.type", '"cpu"'),
    (r"\.cuda\(\)", ".cpu()"),
    (r"torch\.cuda\.", "torch.cpu."),
    (r'"cuda(:0)?"', '"cpu"'),
    (r",\s*device_ids=\[self\.rank\]", ""),
)


def load(name: str, path: str, replacements: tuple[tuple[str, str], ...]) -> types.ModuleType:
    """Return a module of torch's tests, with its text changed."""
    with open(path) as file:
        source = file.read()
    for found, instead in replacements:
        source = re.sub(found, instead, source)
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    return module


def forked(base: type) -> Callable[[Any], None]:
    """Return a setUp() of a class of tests, which forks the ranks."""

    def set_up(self: Any) -> None:
        self._spawn_processes = lambda: self._start_processes(torch.multiprocessing.get_context("fork").Process)
        base.setUp(self)  # type: ignore[attr-defined]

    import torch

    return set_up


def tests_of_the_wheel() -> list[type]:
    from torch.testing._internal.common_distributed import DistTestCases

    for backends in (*DistTestCases.backend_feature.values(), *DistTestCases.skip_collective.values()):
        if "gloo" in backends:
            backends.add("dualdist")
    DistTestCases.backend_feature["plugin"].add("dualdist")
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert spec.origin is not None
    module = load(MODULE, spec.origin, SAME_AS_GLOO)
    bases = (module.TestDistBackend, module.DistributedTest._DistTestBase)

    def set_up(self: Any) -> None:
        module.TestDistBackend.setUp(self)
        self._spawn_processes()

    made = type("Test", bases, {"setUp": set_up})
    return [type("Test", (made,), {"setUp": forked(made)})]


def tests_of_file(path: str, backend: str, ranks: int) -> list[type]:
    """Return the classes of tests of several processes in a file of torch's source tree."""
    import torch.distributed as dist
    from torch.testing._internal import common_distributed, common_fsdp

    def always(*_: object, **__: object) -> Callable[[object], object]:
        return lambda test: test

    for name in ("skip_if_lt_x_gpu", "requires_nccl", "requires_accelerator_dist_backend"):
        setattr(common_distributed, name, always)
    vars(common_fsdp).setdefault("test_compiled_fsdp", always)  # of torch until 2.8
    common_fsdp.DISTRIBUTED_BACKEND, common_fsdp.DEVICE_COUNT = backend, ranks  # type: ignore[assignment]
    torch = sys.modules["torch"]
    torch.accelerator.device_count = torch.cpu.device_count = lambda: ranks  # type: ignore[attr-defined]
    start, new = dist.init_process_group, dist.new_group

    def of_backend(call: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("backend") in ("gloo", "nccl"):
                kwargs["backend"] = backend
            return call(*(backend if each in ("gloo", "nccl") else each for each in args), **kwargs)

        return begin

    for module in (dist, dist.distributed_c10d):
        module.init_process_group, module.new_group = of_backend(start), of_backend(new)  # type: ignore[attr-defined]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    loaded = load("tested", path, ON_CPUS)
    found = []
    for each in vars(loaded).values():
        if isinstance(each, type) and issubclass(each, common_distributed.MultiProcessTestCase):
            body = {"setUp": forked(each), "world_size": property(lambda _: ranks), "__module__": "tested"}
            found.append(type(each.__name__, (each,), body))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Run torch's distributed tests on a backend.")
    parser.add_argument("--backend", default="dualdist")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--file", default="", help="of torch's source tree, instead of the tests of torch's wheel")
    parser.add_argument("-k", default="", help="only tests with this in their names")
    parser.add_argument("--skip", default="", help="no tests whose names match this expression")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        environment = {"TEMP_DIR": folder, "BACKEND": options.backend, "WORLD_SIZE": str(options.ranks)}
        os.environ.update({"INIT_METHOD": "env://", "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": TEST_S, **environment})
        import torch

        import dualdist.c10d  # noqa: F401

        torch.set_num_threads(1)
        path = options.file
        classes = tests_of_file(path, options.backend, options.ranks) if path else tests_of_the_wheel()
        suite = unittest.TestSuite()
        for each in classes:
            for name in unittest.TestLoader().getTestCaseNames(each):
                if options.k in name and not (options.skip and re.search(options.skip, name)):
                    suite.addTest(each(name))
        result = unittest.TextTestRunner(verbosity=2).run(suite)
    failed = sorted({case._testMethodName for case, _ in result.failures + result.errors})  # type: ignore[attr-defined]
    passed = result.testsRun - len(result.skipped) - len(failed)
    print(f"{options.backend}, {options.ranks} ranks: {passed} passed, ", end="")
    print(f"{len(result.skipped)} skipped, {len(failed)} failed: {' '.join(failed)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
