"""`python -m dualdist.hvd`: Horovod's module names import dualdist.hvd, and programs run as under plain python."""

import sys
from collections.abc import Sequence

import pytest
from harness.jobs import Launch
from launch.running import EXEC, printed

pytestmark = pytest.mark.smoke
HVD = (sys.executable, "-m", "dualdist.hvd")
# Hides the installed Horovod.
NOT_INSTALLED = """\
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "horovod":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
"""
INSTALL = "from dualdist.hvd.alias import TABLE, install; install()\n"


@pytest.mark.smoke("without one")
@pytest.mark.parametrize("place", ["", NOT_INSTALLED], ids=["beside a real Horovod", "without one"])
def test_horovod_names_are_our_modules_themselves(launch: Launch, place: str) -> None:
    code = f"""{place}{INSTALL}
import importlib
for name, ours in TABLE.items():
    module = importlib.import_module(name)
    assert module is importlib.import_module(ours), name
    assert module.__spec__.name == module.__name__ == ours, (name, module.__spec__)
import horovod, horovod.runner, horovod.torch as hvd
from horovod import torch as again
from horovod.torch import elastic
from horovod.torch.mpi_ops import allreduce
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.common.basics import HorovodBasics
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet
from horovod.common.util import gloo_built, split_list
from horovod.runner.util.threads import in_thread
import dualdist.hvd
assert hvd is again is dualdist.hvd
assert elastic is hvd.elastic and elastic.ElasticSampler is ElasticSampler
assert allreduce is hvd.allreduce and ProcessSet is hvd.ProcessSet and HorovodInternalError is hvd.HorovodInternalError
assert horovod.__version__ == "0.28.1" and horovod.run is horovod.runner.run
assert HorovodBasics("", "").rank is hvd.rank and gloo_built() == bool(hvd.gloo_built())
assert split_list(list(range(7)), 3) == [[0, 1, 2], [3, 4], [5, 6]]
seen = []
in_thread(seen.append, ("x",)).join()
print(seen)
"""
    assert printed(launch, code) == "['x']"


@pytest.mark.full
@pytest.mark.parametrize("name", ["tensorflow", "keras.callbacks", "mxnet", "spark.torch", "ray"])
def test_modules_of_other_frameworks_are_refused_with_the_reason(launch: Launch, name: str) -> None:
    done = launch([sys.executable, "-c", f"{INSTALL}import horovod.{name}"], check=False)
    assert done.rc == 1
    framework = name.split(".")[0]
    assert (
        f"No module named 'horovod.{framework}': here 'horovod' is dualdist, which has horovod.torch only"
        in done.stderr
    )


@pytest.mark.full
def test_an_unknown_name_is_an_import_error(launch: Launch) -> None:
    """Also the name of a file of ours that Horovod does not have."""
    code = f"""{NOT_INSTALLED}{INSTALL}
import importlib
for name in ("horovod.torch.running", "horovod.runner.http.http_server"):
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(error)
"""
    lines = printed(launch, code).splitlines()
    assert [line.split(": ", 1)[0] for line in lines] == [
        "No module named 'horovod.torch.running'",
        "No module named 'horovod.runner.http'",
    ]
    assert all("dualdist install-horovod" in line for line in lines)


@pytest.mark.full
def test_other_names_come_from_the_installed_horovod(launch: Launch) -> None:
    """Also after a second install(), which changes nothing."""
    code = f"""import sys
{INSTALL}
before = list(sys.meta_path), list(sys.path)
install()
assert (sys.meta_path, sys.path) == before
import horovod.runner.http.http_server as server
from horovod.runner import launch
from horovod.runner.common.util import hosts
import horovod.torch, dualdist.hvd
from dualdist.utils.horovod_names import real_horovod
with real_horovod():
    import horovod.runner.http.http_server as real
assert server is real and server.__spec__.name == "horovod.runner.http.http_server"
assert horovod.torch is dualdist.hvd
print(hosts.parse_hosts("a:2")[0].slots)
"""
    assert printed(launch, code) == "2"


@pytest.mark.smoke("fresh")
@pytest.mark.parametrize("first", ["", "import horovod.torch as early\n"], ids=["fresh", "imported before the alias"])
def test_the_real_horovod_is_found_in_its_block_only_and_loaded_once(launch: Launch, first: str) -> None:
    code = f"""{first}{INSTALL}
import sys, horovod.torch as ours
from dualdist.utils.horovod_names import real_horovod
def seen():
    return {{name: module for name, module in sys.modules.items() if name.partition(".")[0] == "horovod"}}
before, path = seen(), list(sys.path)
@real_horovod()
def load():
    with real_horovod():
        import horovod.torch
        return horovod.torch
real = load()
assert "site-packages" in real.__file__ and real is not ours
{"assert real is early" if first else ""}
assert seen() == before and sys.path == path
try:
    with real_horovod():
        import horovod.torch.nowhere
except ModuleNotFoundError as error:
    assert "dualdist" not in str(error)
assert seen() == before and sys.path == path
import horovod.torch.mpi_ops
assert horovod.torch is ours and horovod.torch.mpi_ops is not real.mpi_ops and load() is real
print(real.is_initialized())
"""
    assert printed(launch, code) == "False"


@pytest.mark.full
def test_the_build_record_of_the_real_horovod_is_read_under_the_alias(launch: Launch) -> None:
    ask = "from dualdist.horovod_build.record import read_record; print(read_record())"
    assert printed(launch, f"{INSTALL}{ask}") == printed(launch, ask) != "None"


SHOW = """\
import sys, horovod
print(sys.argv, sys.path[0], __name__, __file__, __package__, __spec__ and __spec__.name, type(__loader__).__name__)
import __main__
assert vars(__main__) is globals()
"""
PROGRAMS: dict[str, Sequence[str]] = {
    "script": ("show.py", "-m", "--flag", "x"),
    "script in a folder": ("folder/show.py",),
    "module": ("-m", "show", "a"),
    "module of a package": ("-m", "package.show"),
    "package": ("-m", "package", "-x"),
    "no folder on the path": ("-P", "show.py"),
}


@pytest.mark.smoke("script")
@pytest.mark.parametrize("words", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_a_program_sees_what_it_sees_under_plain_python(launch: Launch, words: Sequence[str]) -> None:
    for name in ("show.py", "folder/show.py", "package/show.py", "package/__main__.py"):
        launch.write(name, SHOW)
    launch.write("package/__init__.py", "")
    options = [word for word in words if word == "-P"]
    if options and sys.version_info < (3, 11):
        pytest.skip("python has -P since 3.11")
    rest = words[len(options) :]
    plain = launch([sys.executable, *options, *rest])
    assert launch([sys.executable, *options, "-m", "dualdist.hvd", *rest]).stdout == plain.stdout
    assert not (launch.directory / "__pycache__" / f"show.{sys.implementation.cache_tag}.pyc").exists() or "-m" in words


@pytest.mark.full
def test_packages_of_a_module_import_dualdist_hvd(launch: Launch) -> None:
    launch.write("package/__init__.py", "import horovod.torch as hvd")
    launch.write("package/train.py", "from package import hvd; print(hvd.__name__)")
    assert launch([*HVD, "-m", "package.train"]).stdout == "dualdist.hvd\n"


ENDINGS = {
    "exceptions": (
        "def f():\n    raise KeyError('own')\n"
        "try:\n    f()\nexcept KeyError as error:\n    raise ValueError(2) from error\n"
    ),
    "syntax error": "x = (\n",
    "import of nothing": "import nothing_of_this_name\n",
    "own hook": "import sys\nsys.excepthook = lambda kind, error, tb: print(kind, tb.tb_lineno, tb.tb_next)\n1 / 0\n",
    "interrupt": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(30)\n",
    "exit code": "import sys\nsys.exit(7)\n",
    "exit message": "raise SystemExit('that was it')\n",
    "pickle at exit": (
        "import atexit, pickle\nclass Own:\n    pass\n"
        "atexit.register(lambda: print(type(pickle.loads(pickle.dumps(Own()))) is Own))\n"
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("text", ENDINGS.values(), ids=ENDINGS.keys())
@pytest.mark.parametrize("run", [HVD, EXEC], ids=["hvd", "exec"])
def test_a_program_ends_as_it_does_under_plain_python(launch: Launch, run: Sequence[str], text: str) -> None:
    """The same output, traceback without our frames, and exit code."""
    script = launch.write("script.py", text)
    plain, ours = launch([sys.executable, script], check=False), launch([*run, script], check=False)
    assert (ours.rc, ours.stdout, ours.stderr) == (plain.rc, plain.stdout, plain.stderr)


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        ((), 2, "usage: python -m dualdist.hvd script.py"),
        (("-m",), 2, "usage:"),
        (("nowhere.py",), 2, "there is no file"),
        (("-m", "nowhere"), 1, "no module nowhere"),
        (("-m", "nowhere.at.all"), 1, "No module named 'nowhere'"),
        ((".",), 2, "there is no file"),
    ],
)
def test_a_missing_program_is_named(launch: Launch, words: Sequence[str], code: int, error: str) -> None:
    done = launch([*HVD, *words], check=False)
    assert done.rc == code
    assert error in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_child_processes_of_a_program_import_dualdist_hvd(launch: Launch) -> None:
    """As the workers of a DataLoader in Horovod's examples: by forkserver, which imports the script again."""
    script = launch.write(
        "script.py",
        """\
import multiprocessing, sys
import horovod.torch as hvd
def name(_):
    import horovod
    return hvd.__name__, horovod.__version__
if __name__ == "__main__":
    for method in ("fork", "forkserver", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, *pool.map(name, [0]))
""",
    )
    expected = [f"{method} ('dualdist.hvd', '0.28.1')" for method in ("fork", "forkserver", "spawn")]
    assert launch([*HVD, script]).stdout.splitlines() == expected


@pytest.mark.full
def test_a_child_process_can_import_the_real_horovod_first(launch: Launch) -> None:
    """As a rank of horovod.run, which gets its function by pickle, and whose backend imports the real Horovod."""
    launch.write(
        "child.py",
        """\
from dualdist.utils.horovod_names import installed_alias, real_horovod
def both(_):
    assert installed_alias() is None
    with real_horovod():
        import horovod
        real = horovod.__file__
    import horovod.torch
    return "site-packages" in real, horovod.torch.__name__
""",
    )
    script = launch.write(
        "script.py",
        """\
import multiprocessing, child
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(*pool.map(child.both, [0]))
""",
    )
    assert launch([*HVD, script]).stdout == "(True, 'dualdist.hvd')\n"
