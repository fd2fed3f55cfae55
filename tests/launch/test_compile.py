"""Compiled programs compute what they compute without compiler, on both backends, and print no warnings."""

from pathlib import Path

import pytest
from harness.effort import Effort
from harness.jobs import REPORT_DIR, Launch, collect
from launch.running import TORCHRUN

PROGRAM = str(Path(__file__).with_name("compile_program.py"))
# Three, so that some of the ranks are several and not all.
SIZES = {"native": 3, "horovod": 2}
# What torch prints where it breaks a graph that it would rather not, or compiles the same code too often.
NOISE = ("Warning", "torch._dynamo", "recompile_limit")


@pytest.mark.parametrize("backend", ["native", "horovod"])
def test_compiled_programs_compute_what_they_compute_without_compiler(
    launch: Launch, backend: str, tmp_path: Path, effort: Effort
) -> None:
    effort.require_long(unless=backend == "native")
    size = SIZES[backend]
    argv = [*TORCHRUN[:-1], f"--nproc-per-node={size}", PROGRAM, backend]
    (reports := tmp_path / "reports").mkdir()
    outcome = launch(argv, env={REPORT_DIR: str(reports)}, timeout_s=400)
    for report in collect(reports, size, outcome):
        assert report["backend"] == backend
        assert report["checked"]
        assert not report["failures"], "\n".join(f"{name}\n{text}" for name, text in report["failures"].items())
    assert not [word for word in NOISE if word in outcome.stderr], outcome.stderr
