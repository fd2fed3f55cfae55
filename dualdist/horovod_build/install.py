"""install-horovod from start to end: look, plan, build or find the wheel, install, try."""

from __future__ import annotations

import contextlib
import importlib
import re
import shutil
import tempfile
import time
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from dualdist.errors import BuildError
from dualdist.horovod_build import effects, patches, plan, probe
from dualdist.horovod_build.machine import BuildOptions
from dualdist.horovod_build.record import RECORD_NAME, from_json, read_record, to_json

# make's "[ 42%] Building CXX object ..." as CMake writes it.
PERCENT = re.compile(r"^\s*\[\s*(\d{1,3})%\]\s+(.*)")
STEP_PERCENT = 10


def percent_of(line: str) -> tuple[int, str] | None:
    """How far the build is and what it does, if the line says so."""
    found = PERCENT.match(line)
    return (int(found[1]), found[2]) if found else None


@dataclass
class BuildProgress:
    """Writes to `stream`; call `line` for each line of output and `done` at the end of a step."""

    stream: TextIO
    started: float = field(default_factory=time.monotonic)
    _shown: int = -STEP_PERCENT
    _open: bool = False

    def say(self, text: str) -> None:
        """A line of its own."""
        self.done()
        print(text, file=self.stream, flush=True)

    def line(self, text: str) -> None:
        """One line of a command's output; shown if it tells how far the build is."""
        found = percent_of(text)
        if found is None:
            return
        percent, doing = found
        if self.stream.isatty():
            width = shutil.get_terminal_size().columns - 1
            shown = f"  {percent:3d}%  {self._elapsed()}  {doing.rsplit('/', 1)[-1]}"[:width]
            print(f"\r{shown:<{width}}", end="", file=self.stream, flush=True)
            self._open = True
        elif percent >= self._shown + STEP_PERCENT:
            self._shown = percent - percent % STEP_PERCENT
            print(f"  {percent:3d}%  {self._elapsed()}", file=self.stream, flush=True)

    def done(self) -> None:
        """The changing line, if there is one, is ended."""
        if self._open:
            print(file=self.stream, flush=True)
        self._open, self._shown = False, -STEP_PERCENT

    def _elapsed(self) -> str:
        seconds = int(time.monotonic() - self.started)
        return f"{seconds // 60}:{seconds % 60:02d}"


def find(folder: Path, key: str) -> Path | None:
    """The whole wheel in the folder that was built under the key; damaged ones are passed over."""
    return next((wheel for wheel in sorted(folder.glob("*.whl")) if is_whole(wheel, key)), None)


def is_whole(wheel: Path, key: str) -> bool:
    """Every byte of the wheel fits its checksum, and its record names the key."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            record = from_json(archive.read(f"horovod/{RECORD_NAME}").decode())
            return archive.testzip() is None and record.key == key
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return False


def keep(wheel: Path, folder: Path) -> Path:
    """The wheel stands in the folder, instead of one of its name; a reader sees the old one or the new one, whole."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as part:
            copy = Path(shutil.copyfile(wheel, Path(part) / wheel.name))
            return copy.replace(folder / wheel.name)
    except OSError as error:
        raise BuildError(
            f"the wheel could not be kept in {folder}: {error}; make room there, or set XDG_CACHE_HOME"
        ) from error


def forget(folder: Path) -> None:
    """No wheel lies in the folder."""
    for wheel in folder.glob("*.whl"):
        with contextlib.suppress(FileNotFoundError):
            wheel.unlink()


DEBUG = "HOROVOD_DEBUG"
# Two ranks need seconds; a machine that is busy with other builds needs more.
TRIAL_TIMEOUT_S = 180


def install_horovod(options: BuildOptions, environ: Mapping[str, str], out: TextIO) -> None:
    """Horovod is installed in this Python environment and two ranks have reduced with it; BuildError if not."""
    try:
        _install(options, environ, out)
    except OSError as error:
        raise BuildError(
            f"{error}: if a folder is full or not writable, name another in TMPDIR (for the build) or XDG_CACHE_HOME"
        ) from error


def _install(options: BuildOptions, environ: Mapping[str, str], out: TextIO) -> None:
    progress = BuildProgress(out)
    machine = probe.look(environ)
    todo = plan.make_plan(options, machine, probe.search_path(environ), debug=environ.get(DEBUG) == "1")
    kept = None if options.force else find(todo.wheel_folder, todo.key)
    if options.dry_run:
        work = Path(machine.work_dir) / plan.UNNAMED_WORK
        print("\n".join(plan.describe(todo, work, kept is not None)), file=out)
        return
    todo.log.parent.mkdir(parents=True, exist_ok=True)
    todo.log.write_text("")
    progress.say(plan.summary(todo.record))
    installed = read_record()
    if kept and installed and installed.key == todo.key:
        progress.say("already installed")
        try:
            _try(todo, environ, progress)
            return
        except BuildError as error:
            progress.say(f"the installed one does not work and is installed anew: {error}")
    if kept:
        progress.say(f"the wheel was built before: {kept}")
        try:
            _put(todo, kept, environ, progress)
            return
        except BuildError as error:
            progress.say(f"the wheel in the cache does not work here and is built anew: {error}")
            forget(todo.wheel_folder)
    _put(todo, _built(todo, environ, progress), environ, progress)


def _built(todo: plan.BuildPlan, environ: Mapping[str, str], progress: BuildProgress) -> Path:
    """The wheel, built and in the cache."""
    with tempfile.TemporaryDirectory(prefix="dualdist-horovod-", ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        version = todo.options.version
        progress.say("downloading the sources")
        effects.run(plan.download(todo, work), environ, what=f"downloading horovod=={version}", log=todo.log)
        effects.unpack(work / f"horovod-{version}.tar.gz", work)
        source = plan.source_folder(todo, work)
        patches.apply(source, todo.patches)
        (source / "horovod" / RECORD_NAME).write_text(to_json(todo.record))
        if todo.options.gpu and todo.machine.nccl:
            plan.nccl_folder(work).mkdir()
            (plan.nccl_folder(work) / "libnccl.so").symlink_to(todo.machine.nccl.library)
        progress.say(f"compiling (some minutes; the output goes to {todo.log})")
        what = "building Horovod"
        effects.run(plan.build(todo, work), environ, what=what, log=todo.log, see=progress.line)
        progress.done()
        wheels = sorted((work / "wheel").glob("*.whl"))
        if len(wheels) != 1 or not is_whole(wheels[0], todo.key):
            raise BuildError(f"{what} ended well, but left no usable wheel ({len(wheels)} found); see {todo.log}")
        return keep(wheels[0], todo.wheel_folder)


def _put(todo: plan.BuildPlan, wheel: Path, environ: Mapping[str, str], progress: BuildProgress) -> None:
    """The wheel is installed and tried; where the trial fails, no Horovod is left that would break at first use."""
    progress.say("installing")
    effects.run(plan.install(todo, wheel), environ, what=f"installing {wheel.name}", log=todo.log)
    importlib.invalidate_caches()
    try:
        _try(todo, environ, progress)
    except BuildError:
        effects.run(plan.uninstall(todo), environ, what="uninstalling horovod", log=todo.log)
        raise


def _try(todo: plan.BuildPlan, environ: Mapping[str, str], progress: BuildProgress) -> None:
    """Two ranks got the right sums over each transport."""
    trials = plan.trials(todo)
    for transport, command in trials.items():
        what = f"the trial of two ranks over {transport}"
        lines = effects.run(command, environ, what=what, log=todo.log, timeout_s=TRIAL_TIMEOUT_S)
        # Not the lines: without a buffer the text and the end of two ranks' lines may mix.
        right = sum(line.count("got the right sums") for line in lines)
        if right != 2:
            raise BuildError(f"{what} ended well, but {right} ranks reported, expected 2; its output is in {todo.log}")
        progress.say(f"two ranks over {transport}: right sums")
    if todo.options.mpi and "mpi" not in trials:
        progress.say("not tried over MPI: there is no mpirun on PATH")
    progress.say(f"done: {plan.summary(todo.record)}")
