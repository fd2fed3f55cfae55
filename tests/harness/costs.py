"""Cost of a test session: time and processor time per file, and the number of processes that imported torch."""

import os
import resource
import tempfile
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

IMPORTS_FILE = "TEST_TORCH_IMPORTS"
"""Names the file to which each process that imports torch appends a byte."""
SLOWEST = 10
CPU_S = "cpu_s"
ALL = "all files"


def start(config: pytest.Config) -> None:
    """Start counting. A worker of pytest-xdist inherits the variable of its session."""
    if IMPORTS_FILE not in os.environ:
        handle, path = tempfile.mkstemp(prefix="dualdist-tests-imports-")
        os.close(handle)
        os.environ[IMPORTS_FILE] = path
        config.add_cleanup(lambda: Path(path).unlink(missing_ok=True))
    config.pluginmanager.register(Costs(config.getoption("--costs")))


def cpu_s() -> float:
    """Return the processor time of this process and of all its descendants that have ended, in seconds."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Costs:
    """A pytest plug-in: records each test's processor time in its report, and sums the reports per file."""

    def __init__(self, every_test: Path | None = None) -> None:
        self._of_tests: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._every_test = every_test
        self._last_cpu_s = 0.0

    def pytest_runtest_logstart(self) -> None:
        self._last_cpu_s = cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the processor time since the last phase of the test."""
        report = yield
        before, self._last_cpu_s = self._last_cpu_s, cpu_s()
        report.user_properties.append((CPU_S, self._last_cpu_s - before))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._of_tests[report.nodeid.rpartition("@")[0] or report.nodeid]
        test[0] += report.duration
        test[1] += dict(report.user_properties).get(CPU_S, 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for name, (wall_s, cpu_s) in self._of_tests.items():
            for total in (files[name.partition("::")[0]], files[ALL]):
                total[0] += wall_s
                total[1] += cpu_s
        slowest = sorted(files, key=lambda name: -files[name][0])
        terminalreporter.section("slowest files: seconds, CPU seconds")
        for name in slowest[: 1 + SLOWEST]:
            terminalreporter.write_line("{:8.1f} {:8.1f}  {}".format(*files[name], name))
        if self._every_test:
            lines = ("{:.2f}\t{:.2f}\t{}\n".format(*cost, name) for name, cost in self._of_tests.items())
            self._every_test.write_text("".join(lines))
        imports = Path(os.environ[IMPORTS_FILE]).stat().st_size
        terminalreporter.write_line(f"processes that imported torch: {imports}")
