"""install-horovod from start to end: probe, plan, build or take the wheel from the cache, install, test."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import re
import shutil
import signal
import subprocess
import tarfile
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from dualdist.errors import BuildError
from dualdist.horovod_build import patches, plan
from dualdist.horovod_build.machine import HOROVOD_VERSION, BuildOptions, probe_machine
from dualdist.horovod_build.plan import BuildCommand
from dualdist.horovod_build.record import RECORD_NAME, read_record, to_json
from dualdist.utils.deadline import Deadline, LineReader

# The first match shows the error; later ones are mostly its consequences. pip retries without a network.
FIRST_ERROR = re.compile(
    r"\berror:|CMake Error|undefined reference|cannot find -l|^\s*\w*Error: |^ERROR: |Retrying \(Retry", re.IGNORECASE
)
SHOWN_LINES = 6
SHOWN_WIDTH = 300
HINTS = (
    (r"No space left on device|Disk quota exceeded", " for lack of disk space: set TMPDIR to a folder on another disk"),
    (r"Killed signal terminated program|error: Killed|virtual memory exhausted",
     " for lack of memory: close other programs, or type: dualdist install-horovod --jobs 1"),
    (r"Retrying \(Retry", " because the package index did not answer: check the network and `pip config list`; without "
     "a network, set PIP_FIND_LINKS to a folder with the sdist"),
)  # fmt: skip
# make's "[ 42%] Building CXX object ...", as CMake prints it.
PERCENT = re.compile(r"^\s*\[\s*(\d{1,3})%\]\s")
STEP_PERCENT = 10
# Two ranks need seconds; a machine that is busy with other builds needs more.
TEST_TIMEOUT_S = 180


def find_wheel(folder: Path) -> Path | None:
    """Return the intact wheel in the folder."""
    for wheel in sorted(folder.glob("*.whl")):
        with contextlib.suppress(OSError, EOFError, zipfile.BadZipFile, zlib.error), zipfile.ZipFile(wheel) as archive:
            if archive.testzip() is None:
                return wheel
    return None


def cache_wheel(wheel: Path, folder: Path) -> Path:
    """Copy the wheel into the folder atomically."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as part:
            copy = Path(shutil.copyfile(wheel, Path(part) / wheel.name))
            return copy.replace(folder / wheel.name)
    except OSError as error:
        raise BuildError(
            f"the wheel could not be saved in {folder}: {error}; free some space there, or set XDG_CACHE_HOME"
        ) from error


def install_horovod(options: BuildOptions, environ: Mapping[str, str], out: TextIO) -> None:
    """Install Horovod in this Python environment and test it on two ranks; raise BuildError on failure."""
    try:
        _install(options, environ, out)
    except OSError as error:
        raise BuildError(
            f"{error}: if a folder is full or not writable, set TMPDIR (for the build) or XDG_CACHE_HOME to another"
        ) from error


def _install(options: BuildOptions, environ: Mapping[str, str], out: TextIO) -> None:
    progress = BuildProgress(out)
    build = plan.make_plan(probe_machine(options, environ))
    cached = None if options.force else find_wheel(build.wheel_folder)
    if options.dry_run:
        work = Path(tempfile.gettempdir()) / plan.WORK_PLACEHOLDER
        print("\n".join(plan.describe(build, work, cached)), file=out)
        return
    build.log.parent.mkdir(parents=True, exist_ok=True)
    build.log.write_text("")
    progress.print(plan.summarize(build.record))
    installed = read_record()
    try:
        if cached and installed and installed.key == build.key:
            progress.print("already installed")
            _test(build, environ, progress)
        else:
            if cached:
                progress.print(f"using the cached wheel {cached}")
            _install_wheel(build, cached or _build_wheel(build, environ, progress), environ, progress)
    except BuildError as error:
        if cached:
            raise BuildError(f"{error}\n  to build Horovod again: dualdist install-horovod --force") from error
        raise


def _build_wheel(build: plan.BuildPlan, environ: Mapping[str, str], progress: BuildProgress) -> Path:
    """Build the wheel and return its path in the cache."""
    with tempfile.TemporaryDirectory(prefix="dualdist-horovod-", ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        progress.print("downloading the sources")
        run_command(plan.download(build, work), environ, title=f"downloading horovod=={HOROVOD_VERSION}", log=build.log)
        archive = work / f"{plan.SOURCE_FOLDER}.tar.gz"
        try:
            shutil.unpack_archive(archive, work)
        except (OSError, tarfile.TarError) as error:
            raise BuildError(f"{archive.name} could not be unpacked in {work}: {error}") from error
        source = work / plan.SOURCE_FOLDER
        patches.apply(source, build.patches)
        (source / "horovod" / RECORD_NAME).write_text(to_json(build.record))
        if build.machine.nccl:
            (work / plan.NCCL_FOLDER).mkdir()
            (work / plan.NCCL_FOLDER / "libnccl.so").symlink_to(build.machine.nccl.library)
        progress.print(f"compiling (some minutes; the output goes to {build.log})")
        command = plan.build(build, work)
        run_command(command, environ, title="building Horovod", log=build.log, on_line=progress.on_line)
        (wheel,) = (work / "wheel").glob("*.whl")
        return cache_wheel(wheel, build.wheel_folder)


def _install_wheel(build: plan.BuildPlan, wheel: Path, environ: Mapping[str, str], progress: BuildProgress) -> None:
    """Install and test the wheel; uninstall it if the test fails."""
    progress.print("installing")
    run_command(plan.install(build, wheel), environ, title=f"installing {wheel.name}", log=build.log)
    importlib.invalidate_caches()
    try:
        _test(build, environ, progress)
    except BuildError:
        uninstall = BuildCommand((build.machine.python, "-m", "pip", "uninstall", "--yes", "horovod"))
        run_command(uninstall, environ, title="uninstalling horovod", log=build.log)
        raise


def _test(build: plan.BuildPlan, environ: Mapping[str, str], progress: BuildProgress) -> None:
    """Run the smoke test of two ranks over each transport."""
    tests = plan.smoke_tests(build)
    for transport, command in tests.items():
        title = f"the smoke test over {transport}"
        lines = run_command(command, environ, title=title, log=build.log, timeout_s=TEST_TIMEOUT_S)
        # Text is counted, not lines: unbuffered, the lines of two ranks may mix.
        passed = sum(line.count("correct sums") for line in lines)
        if passed != 2:
            raise BuildError(f"{title} ended with exit code 0, but {passed} of 2 ranks reported; see {build.log}")
        progress.print(f"smoke test on two ranks over {transport}: passed")
    if build.machine.mpi and "mpi" not in tests:
        progress.print("not tested over MPI: there is no mpirun on PATH")
    progress.print(f"installed {plan.summarize(build.record)}")


def explain_failure(lines: Sequence[str], title: str) -> str:
    """Return the cause of a failure and the output lines that show it, or the last lines."""
    text = "\n".join(lines)
    reason = next((hint for pattern, hint in HINTS if re.search(pattern, text)), "")
    first = next((i for i, line in enumerate(lines) if FIRST_ERROR.search(line)), max(0, len(lines) - SHOWN_LINES))
    shown = (f"    {line.strip()[:SHOWN_WIDTH]}" for line in lines[first : first + SHOWN_LINES] if line.strip())
    return "\n".join((f"{title} failed{reason}", *shown))


def run_command(
    command: BuildCommand,
    environ: Mapping[str, str],
    *,
    title: str,
    log: Path,
    on_line: Callable[[str], None] = lambda line: None,
    timeout_s: float = math.inf,
) -> list[str]:
    """Run a command, append its output to `log`, and return its lines; raise BuildError if it fails or times out.

    The whole process group ends with this call.
    """
    lines: list[str] = []
    try:
        with log.open("a", encoding="utf-8") as file:
            print(f"$ {command}", file=file, flush=True)
            with subprocess.Popen(
                command.argv,
                env=command_environ(command, environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process:
                assert process.stdout is not None
                deadline, output = Deadline(timeout_s), LineReader(process.stdout.fileno())
                try:
                    while line := output.readline(deadline).decode(errors="replace"):
                        lines.append(line.rstrip("\n"))
                        file.write(line)
                        on_line(line)
                    code = process.wait(min(deadline.left_s(), threading.TIMEOUT_MAX))
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{title} did not end within {timeout_s:g} s; its output is in {log}") from error
    except OSError as error:
        raise BuildError(f"{title} failed: {error}") from error
    if code != 0:
        raise BuildError(f"{explain_failure(lines, title)}\n  the full output is in {log}")
    return lines


def command_environ(command: BuildCommand, environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with the command's variables, without those it removes."""
    changed = dict(command.variables)
    return {name: value for name, value in {**environ, **changed}.items() if value or name not in changed}


@dataclass
class BuildProgress:
    """Prints the steps to `stream`, and every 10% of a compilation."""

    stream: TextIO
    started: float = field(default_factory=time.monotonic)
    _next_percent: int = 0

    def print(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def on_line(self, line: str) -> None:
        """Print the percentage and the elapsed time if `line` is make's output and another 10% are reached."""
        match = PERCENT.match(line)
        percent = int(match[1]) if match else -1
        if percent >= self._next_percent:
            self._next_percent = percent - percent % STEP_PERCENT + STEP_PERCENT
            seconds = int(time.monotonic() - self.started)
            self.print(f"  {percent:3d}%  {seconds // 60}:{seconds % 60:02d}")
