"""`make setup`: the package is importable anywhere, and install-horovod works, also from its cached wheel."""

import http.client
import os
import subprocess
import sys
import sysconfig
import venv
from http import HTTPStatus
from pathlib import Path

import pytest
import torch
from harness.jobs import Launch

from dualdist.horovod_build import install as cache
from dualdist.horovod_build.machine import cache_folder
from dualdist.horovod_build.record import BuildRecord, read_record


@pytest.fixture
def record() -> BuildRecord:
    found = read_record()
    if found is None or found.key is None:
        pytest.skip("Horovod was not installed by dualdist: make setup")
    return found


@pytest.fixture
def kept_wheel(record: BuildRecord) -> Path:
    found = cache.find_wheel(cache_folder(os.environ) / "wheels" / str(record.key))
    if found is None:
        pytest.skip("the wheel is no longer in the cache: dualdist install-horovod --force")
    return found


def test_a_second_install_builds_nothing_and_tests_two_ranks(
    record: BuildRecord, kept_wheel: Path, launch: Launch
) -> None:
    command = [sys.executable, "-m", "dualdist", "install-horovod", *["--without-mpi"] * (not record.mpi)]
    done = launch(command, timeout_s=240)
    assert "already installed" in done.stdout
    assert "compiling" not in done.stdout
    for transport in ("gloo", "mpi") if record.mpi else ("gloo",):
        assert f"smoke test on two ranks over {transport}: passed" in done.stdout


@pytest.mark.smoke
def test_the_record_names_the_installed_torch(record: BuildRecord) -> None:
    assert (record.torch, record.torch_git) == (torch.__version__, torch.version.git_version)
    assert record.python == sysconfig.get_config_var("SOABI")


def test_a_cached_wheel_works_in_another_environment(record: BuildRecord, kept_wheel: Path, tmp_path: Path) -> None:
    """It finds MPI beside itself, not in the environment where it was built, which may no longer exist."""
    other = tmp_path / "other"
    venv.create(other, with_pip=False, symlinks=True)
    python = other / "bin" / "python"
    here = Path(sysconfig.get_path("purelib"))
    there = other / here.relative_to(sys.prefix)
    for entry in (Path(sys.prefix) / "lib").iterdir():
        if not entry.name.startswith("python"):
            (other / "lib" / entry.name).symlink_to(entry)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(kept_wheel)], check=True, timeout=120)
    (there / "torch_and_others.pth").write_text(f"{here}\n")
    program = "import horovod.torch as h; h.init(); print(h.__file__, h.size())"
    # MPI's libraries are linked there, its programs are not: MPI is loaded, but Gloo is used.
    environ = {**os.environ, "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    done = subprocess.run(
        [python, "-c", program], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(there))
    searched = runpath(next((there / "horovod" / "torch").glob("mpi_lib_v2*.so")))
    assert sys.prefix not in searched
    assert "$ORIGIN/../../../.." in searched


def runpath(library: Path) -> str:
    done = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, timeout=60, check=True)
    return next(line for line in done.stdout.splitlines() if "RUNPATH" in line or "RPATH" in line)


@pytest.mark.smoke
def test_a_scope_that_completes_leaves_the_counters_of_the_others(record: BuildRecord) -> None:
    """Horovod's server lost the counters of other scopes, and ranks that initialize again their keys."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    try:
        server.init(get_host_assignments(parse_hosts("localhost:2"), 2))
        request(port, "PUT", "global/0", b"here")
        request(port, "DELETE", "global/0")
        request(port, "DELETE", "cross_0/0")
        assert request(port, "GET", "global/0") == HTTPStatus.OK
        request(port, "DELETE", "global/1")
        assert request(port, "GET", "global/0") == HTTPStatus.NOT_FOUND
    finally:
        server.stop()
        server._httpd.server_close()


def request(port: int, verb: str, path: str, body: bytes | None = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(verb, f"/{path}", body=body)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def test_a_clone_beside_a_script_does_not_hide_the_package(launch: Launch) -> None:
    """Python would import a folder called dualdist as a namespace package, were the package not on the path first."""
    (launch.directory / "dualdist").mkdir()
    script = launch.write("script.py", "import dualdist as dd\nprint(dd.init.__name__)\n")
    assert launch([sys.executable, script], env={"PYTHONPATH": ""}).stdout == "init\n"
