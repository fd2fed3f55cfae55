"""Backends by name: built in, of another package by its entry point, and registered by the program."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from dualdist.backends import registry
from dualdist.cli import main
from dualdist.errors import UsageError
from dualdist.launch.job_file import loads
from dualdist.rendezvous.backend_selection import check_choice

if sys.version_info >= (3, 11):
    import tomllib

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "tests" / "contract" / "plugin"
BUILTIN = ("native", "horovod", "mpi")


@pytest.fixture(autouse=True)
def _fresh_registry() -> Iterator[None]:
    registry._entry_points.cache_clear()
    registry._registered.cache_clear()
    yield
    registry._entry_points.cache_clear()
    registry._registered.cache_clear()


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))


def install(folder: Path, name: str, value: str) -> None:
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[dualdist.backends]\n{value}\n")


def test_the_built_in_backends_are_found_without_metadata_and_a_program_registers_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    assert registry.names() == BUILTIN
    assert registry.choices() == ("auto", *BUILTIN)
    assert [registry.get(name).name for name in (*BUILTIN, "single")] == [*BUILTIN, "single"]
    assert [registry.get(name).launcher for name in BUILTIN] == ["torchrun", "horovodrun", "mpirun"]
    assert [name for name in BUILTIN if registry.get(name).needs_mpi] == ["mpi"]
    spec = registry.register("mine", lambda context: pytest.fail("not started"), ("tcp",), needs_mpi=True)
    assert registry.get("mine") is spec
    assert registry.names() == (*BUILTIN, "mine")
    assert registry.needs_mpi("mine", None)
    assert not registry.needs_mpi("native", "gloo")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_the_package_declares_its_own_backends_as_others_do() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][registry.GROUP]
    assert declared == registry.BUILTIN


@pytest.mark.usefixtures("plugin")
def test_a_backend_of_another_package_is_accepted_wherever_a_name_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert registry.names() == (*BUILTIN, "sockets")
    assert registry.get("sockets").transports == ("tcp",)
    assert "tcp" in registry.transports()
    check_choice("sockets", registry.choices(), "backend", "DUALDIST_BACKEND")
    assert loads("program: train.py\nbackend: sockets\ntransport: tcp", "job.yaml")[0]["backend"] == "sockets"
    assert main(["run", "--dry-run", "-np", "2", "--backend", "sockets", str(PLUGIN / "dualdist_sockets.py")]) == 0
    assert "DUALDIST_BACKEND=sockets" in capsys.readouterr().out
    available = registry.availability({"torch": "2.9.0", "mpi4py": None}, None)
    assert available["sockets"].available
    with pytest.raises(UsageError, match=r"'socket': expected one of native, horovod, mpi, sockets.*'sockets'"):
        registry.get("socket")


@pytest.mark.usefixtures("plugin")
def test_a_benchmark_of_raw_libraries_refuses_a_backend_over_another_one(capsys: pytest.CaptureFixture[str]) -> None:
    for benchmark in ("allreduce", "startup"):
        assert main(["bench", benchmark, "--backend", "sockets", "--dry-run"]) == 2
        words = f"backend 'sockets': bench {benchmark} compares a backend with the raw library beneath it, one of"
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", ["native", "single", "auto", "mine"])
def test_a_name_is_registered_once(name: str) -> None:
    registry.register("mine", lambda context: pytest.fail("not started"), ("tcp",))
    with pytest.raises(UsageError, match=name):
        registry.register(name, lambda context: pytest.fail("not started"), ("tcp",))


@pytest.mark.parametrize(
    ("code", "reason"), [("raise OSError('no driver')", "no driver"), ("SPEC = 1", "no BackendSpec")]
)
def test_a_backend_that_cannot_be_loaded_is_refused_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    install(tmp_path, "broken", "broken = broken_backend:SPEC")
    (tmp_path / "broken_backend.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=reason):
        registry.get("broken")
    available = registry.availability({"torch": "2.9.0", "mpi4py": None}, None)
    assert (available["broken"].available, available["native"].available) == (False, True)
    assert reason in available["broken"].reason
    assert set(registry.backend_transports()) == set(BUILTIN)
    sys.modules.pop("broken_backend", None)


def test_two_packages_with_one_backend_name_are_named_by_every_command(
    tmp_path: Path, base_env: Mapping[str, str]
) -> None:
    for package in ("one", "two"):
        install(tmp_path, package, f"rdma = {package}:SPEC")
    env = {**base_env, "PYTHONPATH": f"{tmp_path}:{base_env['PYTHONPATH']}"}
    for words in (["doctor"], ["run", "--dry-run", "-c", "1"], ["info"]):
        argv = [sys.executable, "-m", "dualdist", *words]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        assert "two installed packages have a backend 'rdma'" in done.stderr
