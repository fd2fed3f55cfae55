"""install-horovod from start to end: probe, plan, build or take the wheel from the cache, install, test."""

from __future__ import annotations

import importlib
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from dualdist.errors import BuildError
from dualdist.horovod_build import patches, plan, probe
from dualdist.horovod_build.commands import BuildProgress, run_command, unpack
from dualdist.horovod_build.machine import BuildOptions
from dualdist.horovod_build.record import RECORD_NAME, from_json, read_record, to_json

DEBUG = "HOROVOD_DEBUG"
# Two ranks need seconds; a machine that is busy with other builds needs more.
TEST_TIMEOUT_S = 180


def find_wheel(folder: Path, key: str) -> Path | None:
    """Return the intact wheel in the folder that was built with this key."""
    return next((wheel for wheel in sorted(folder.glob("*.whl")) if is_intact(wheel, key)), None)


def is_intact(wheel: Path, key: str) -> bool:
    """Return True if the wheel matches its checksums and its build record has this key."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            record = from_json(archive.read(f"horovod/{RECORD_NAME}").decode())
            return archive.testzip() is None and record.key == key
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return False


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
    machine = probe.probe_machine(environ)
    build = plan.make_plan(options, machine, probe.search_path(environ), debug=environ.get(DEBUG) == "1")
    cached = None if options.force else find_wheel(build.wheel_folder, build.key)
    if options.dry_run:
        work = Path(machine.work_dir) / plan.WORK_PLACEHOLDER
        print("\n".join(plan.describe(build, work, is_cached=cached is not None)), file=out)
        return
    build.log.parent.mkdir(parents=True, exist_ok=True)
    build.log.write_text("")
    progress.print(plan.summarize(build.record))
    installed = read_record()
    if cached and installed and installed.key == build.key:
        progress.print("already installed")
        try:
            _test(build, environ, progress)
            return
        except BuildError as error:
            progress.print(f"the installed Horovod does not work and is reinstalled: {error}")
    if cached:
        progress.print(f"using the cached wheel {cached}")
        try:
            _install_wheel(build, cached, environ, progress)
            return
        except BuildError as error:
            progress.print(f"the cached wheel does not work and is rebuilt: {error}")
    _install_wheel(build, _build_wheel(build, environ, progress), environ, progress)


def _build_wheel(build: plan.BuildPlan, environ: Mapping[str, str], progress: BuildProgress) -> Path:
    """Build the wheel and return its path in the cache."""
    with tempfile.TemporaryDirectory(prefix="dualdist-horovod-", ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        version = build.options.version
        progress.print("downloading the sources")
        run_command(plan.download(build, work), environ, title=f"downloading horovod=={version}", log=build.log)
        unpack(work / f"horovod-{version}.tar.gz", work)
        source = plan.source_folder(build, work)
        patches.apply(source, build.patches)
        (source / "horovod" / RECORD_NAME).write_text(to_json(build.record))
        if build.options.gpu and build.machine.nccl:
            plan.nccl_folder(work).mkdir()
            (plan.nccl_folder(work) / "libnccl.so").symlink_to(build.machine.nccl.library)
        progress.print(f"compiling (some minutes; the output goes to {build.log})")
        title = "building Horovod"
        run_command(plan.build(build, work), environ, title=title, log=build.log, on_line=progress.on_line)
        wheels = sorted((work / "wheel").glob("*.whl"))
        if len(wheels) != 1 or not is_intact(wheels[0], build.key):
            raise BuildError(f"{title} succeeded, but left no usable wheel ({len(wheels)} found); see {build.log}")
        return cache_wheel(wheels[0], build.wheel_folder)


def _install_wheel(build: plan.BuildPlan, wheel: Path, environ: Mapping[str, str], progress: BuildProgress) -> None:
    """Install and test the wheel; uninstall it if the test fails."""
    progress.print("installing")
    run_command(plan.install(build, wheel), environ, title=f"installing {wheel.name}", log=build.log)
    importlib.invalidate_caches()
    try:
        _test(build, environ, progress)
    except BuildError:
        uninstall = plan.BuildCommand((build.machine.python, "-m", "pip", "uninstall", "--yes", "horovod"))
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
    if build.options.mpi and "mpi" not in tests:
        progress.print("not tested over MPI: there is no mpirun on PATH")
    progress.print(f"installed {plan.summarize(build.record)}")
