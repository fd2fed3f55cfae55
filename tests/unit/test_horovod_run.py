"""`horovod.run`: its signature, refused options, results and failures."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import horovod
import pytest

from dualdist.errors import LaunchError, UsageError
from dualdist.hvd.run import run


def test_signature_is_horovods() -> None:
    ours, real = inspect.signature(run), inspect.signature(horovod.run)
    shape = [[(p.name, p.kind, p.default) for p in signature.parameters.values()] for signature in (ours, real)]
    assert shape[0] == shape[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_num_proc": 2}, "min_num_proc=2: ranks that come and go"),
        ({"max_np": 2}, "max_np=2: ranks that come and go"),
        ({"slots": 1}, "slots=1"),
        ({"reset_limit": 0}, "reset_limit=0"),
        ({"cooldown_range": (1, 2)}, "cooldown_range="),
        ({"host_discovery_script": "hosts.sh"}, "host_discovery_script='hosts.sh'"),
        ({"use_mpi": True}, "use_mpi=True: no MPI starts these ranks"),
        ({"mpi_args": "-x A"}, "mpi_args='-x A'"),
        ({"use_mpi": True, "use_gloo": True}, "use_gloo=True and use_mpi=True"),
        ({"output_filename": "out"}, "output_filename='out'"),
        ({"executable": "python2"}, "executable='python2'"),
        ({"hosts": "far:1"}, "'far' is not this host"),
        ({"hosts": "localhost"}, "'localhost' in hosts: expected"),
        ({"hosts": "localhost:2", "num_proc": 3}, "2 slots are too few for num_proc=3"),
        ({"hosts": "localhost:2", "hostfile": "hosts"}, "hosts and hostfile"),
        ({"num_proc": 0}, "nprocs=0"),
    ],
)
def test_an_unsupported_option_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        run(print, **options)


def test_hosts_of_a_file_are_checked(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# mine\nlocalhost slots=1\nfar slots=2\n")
    with pytest.raises(UsageError, match="'far' is not this host"):
        run(print, hostfile=str(hostfile))
    hostfile.write_text("localhost 2\n")
    with pytest.raises(UsageError, match=r"'localhost 2' in .*: expected"):
        run(print, hostfile=str(hostfile))


SCRIPT = """\
import sys
import dualdist.hvd.run as running
class Box:
    def __init__(self, value):
        self.value = value
offset = 100
def place(first, last):
    import os
    return Box((int(os.environ["DUALDIST_RANK"]) + offset, first, last))
print("the script runs", flush=True)
boxes = running.run(place, (1,), {"last": 2}, np=3, hosts="localhost:2,127.0.0.1:1", use_gloo=True, verbose=2)
print([box.value for box in boxes], {type(box) is Box for box in boxes}, sys.modules["__main__"].__file__ == __file__)
"""


@pytest.mark.full
def test_results_come_back_in_rank_order_and_the_script_needs_no_guard(
    base_env: Mapping[str, str], tmp_path: Path
) -> None:
    """As with Horovod the ranks do not run the script again; a function and a class of it travel by cloudpickle."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    argv = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(argv, env=dict(base_env), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    results = "[(100, 1, 2), (101, 1, 2), (102, 1, 2)]"
    assert done.stdout.splitlines() == ["the script runs", f"{results} {{True}} True"]


def test_np_is_deprecated_and_works() -> None:
    with pytest.warns(DeprecationWarning, match="num_proc"):
        assert run(abs, (-3,), np=1) == [3]


def test_a_failing_rank_raises_what_a_horovod_program_expects() -> None:
    with pytest.raises(LaunchError, match=r"rank 0 failed:(.|\n)*ValueError: .*'three'") as caught:
        run(int, ("three",))
    assert isinstance(caught.value, RuntimeError)
