"""sdist and wheel, from `python -m build`: a fresh environment installs each from a local index, and trains."""

import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness.base_env import ROOT
from harness.effort import Effort
from harness.installed import environment, lack
from launch.running import blocks

from dualdist.version import __version__

LIMIT_S = 600  # the sdist may compile its extension on busy cores
SDIST, WHEEL = f"dualdist-{__version__}.tar.gz", f"dualdist-{__version__}-py3-none-any.whl"


def run(argv: Sequence[str | Path], cwd: Path, env: Mapping[str, str] = {}) -> str:
    """Run a command without this environment's packages, and return its output."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "DUALDIST_"))}
    bare |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **env}
    done = subprocess.run(argv, cwd=cwd, env=bare, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build sdist and wheel of a copy, in an environment without torch, as a release is built."""
    if find_spec("build") is None or find_spec("twine") is None:
        lack("build and twine", "build twine", "pip install")
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(
        ROOT / "dualdist", folder / "source" / "dualdist", ignore=shutil.ignore_patterns("*.py[co]", "*.so")
    )
    for path in ROOT.iterdir():
        if path.is_file() and path.name[0] != ".":
            shutil.copy(path, folder / "source")
    python = environment(folder / "builder", without=["torch"])
    run([python, "-m", "build", "--no-isolation", "--outdir", folder / "dualdist"], folder / "source")
    return folder / "dualdist"


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None: ...


@pytest.fixture
def index(dist: Path) -> Iterator[str]:
    """Serve a package index on loopback: a folder of its name lists the files of each project."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(dist.parent))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_the_sdist_has_the_sources_and_the_wheel_is_pure(dist: Path) -> None:
    assert sorted(path.name for path in dist.iterdir()) == sorted([SDIST, WHEEL])
    run([sys.executable, "-m", "twine", "check", "--strict", dist / SDIST, dist / WHEEL], dist)
    with tarfile.open(dist / SDIST) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    tracked = set(subprocess.check_output(["git", "ls-files", "dualdist"], cwd=ROOT, text=True).splitlines())
    assert tracked <= packed
    assert {"CHANGELOG.md", "LICENSE", "README.md", "setup.py"} <= packed
    installed = {name for name in zipfile.ZipFile(dist / WHEEL).namelist() if name.startswith("dualdist/")}
    assert installed == tracked


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("form", ["wheel", "sdist"])
def test_a_fresh_environment_installs_it_from_an_index_and_trains(
    index: str, form: str, tmp_path: Path, effort: Effort
) -> None:
    effort.require_long(unless=form == "wheel")
    python = environment(tmp_path / "fresh", without=[])
    only = ["--no-binary", "dualdist", "--no-build-isolation"] if form == "sdist" else ["--only-binary", "dualdist"]
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--index-url", index, *only]
    cache = tmp_path / "cache"
    run([*pip, f"dualdist=={__version__}"], tmp_path, {"XDG_CACHE_HOME": str(cache)})
    page = ROOT / "docs/pages/first-job.md"
    (tmp_path / "train.py").write_text(blocks(page, "python")[0])
    torchrun = python.parent / "torchrun"  # which pip would make with torch
    torchrun.write_text(f"#!{python}\nfrom torch.distributed.run import main\nmain()\n")
    torchrun.chmod(0o755)
    assert run([python.parent / "dualdist", "--version"], tmp_path) == f"dualdist {__version__}\n"
    env = {"OMP_NUM_THREADS": "1", "PATH": f"{python.parent}:{os.environ['PATH']}"}
    lines = blocks(page, "bash")[0].splitlines()
    assert lines[-1].startswith("dualdist run ")
    for line in lines if form == "wheel" else lines[-1:]:
        printed = run(shlex.split(line), tmp_path, env)
        started = "1 ranks, none, single" if line.startswith("python") else "2 ranks, torchrun, native over "
        assert printed.startswith(started), line
    package = Path(run([python, "-c", "import dualdist; print(dualdist.__file__)"], tmp_path).strip()).parent
    assert package.is_relative_to(tmp_path)
    extensions = list(package.glob("_core_*.so"))
    assert len(extensions) == (form == "sdist")
    for extension in extensions:
        (kept,) = cache.rglob(extension.name)
        kept.write_bytes(b"from the cache")
        again = [*pip, "--force-reinstall", "--no-deps", "--no-cache-dir", f"dualdist=={__version__}"]
        run(again, tmp_path, {"XDG_CACHE_HOME": str(cache)})
        assert extension.read_bytes() == b"from the cache"
