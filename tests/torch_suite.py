"""torch's own tests of its collectives and of DDP, which its wheel ships, on the backend "dualdist" or another one.

    python tests/torch_suite.py --backend gloo --ranks 2 [-k WORDS]
    python tests/torch_suite.py --backend dualdist --ranks 3

What they ask of Gloo alone they ask of dualdist, too. The ranks of each test are forked, which spares them the import
of torch. The last line names the tests that failed; docs/pages/guides/torch-backend.md has the reasons. torch's tests
import expecttest, which is not among this project's packages.
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

MODULE = "torch.testing._internal.distributed.distributed_test"
TEST_S = "60"
# Conditions on the backend's name -> the same for dualdist as for Gloo.
SAME_AS_GLOO = (
    (r'BACKEND != "gloo"', 'BACKEND not in ("gloo", "dualdist")'),
    (r'BACKEND == "gloo"', 'BACKEND in ("gloo", "dualdist")'),
    (r'require_backend_is_available\(\{"gloo"', 'require_backend_is_available({"dualdist", "gloo"'),
)


def load() -> types.ModuleType:
    """Return torch's module of tests, with the conditions changed."""
    from torch.testing._internal.common_distributed import DistTestCases

    for backends in (*DistTestCases.backend_feature.values(), *DistTestCases.skip_collective.values()):
        if "gloo" in backends:
            backends.add("dualdist")
    DistTestCases.backend_feature["plugin"].add("dualdist")
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin) as file:
        source = file.read()
    for found, instead in SAME_AS_GLOO:
        source = re.sub(found, instead, source)
    module = types.ModuleType(MODULE)
    module.__file__ = spec.origin
    sys.modules[MODULE] = module
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description="Run torch's distributed tests on a backend.")
    parser.add_argument("--backend", default="dualdist")
    parser.add_argument("--ranks", type=int, default=2)
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
        module = load()

        class Test(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
            def setUp(self) -> None:
                super().setUp()
                self._start_processes(torch.multiprocessing.get_context("fork").Process)

        names = [name for name in unittest.TestLoader().getTestCaseNames(Test) if options.k in name]
        names = [name for name in names if not (options.skip and re.search(options.skip, name))]
        result = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite(Test(name) for name in names))
    failed = sorted({case._testMethodName for case, _ in result.failures + result.errors})  # type: ignore[attr-defined]
    print(
        f"{options.backend}, {options.ranks} ranks: {result.testsRun - len(result.skipped) - len(failed)} passed, ",
        end="",
    )
    print(f"{len(result.skipped)} skipped, {len(failed)} failed: {' '.join(failed)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
