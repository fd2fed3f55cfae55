"""Scripts as computing centres publish them, and the lines of the page about them: how many ranks meet."""

import re
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness.base_env import ROOT
from harness.jobs import Launch
from harness.mpi import of_pypis_mpich
from harness.pages import find_blocks, find_commands, named_programs
from harness.slurm import Slurm
from launch.running import AS_ROOT, TORCHRUN, stand_in

PAGE = "guides/centre-scripts.md"
PROGRAMS = named_programs(PAGE)
LINES = find_commands(PAGE)
LIBRARIES = {"fabric": "lightning", "accelerate": "accelerate"}
PLUGINS = ("with_fabric.py", "with_accelerate.py")
# The changed script follows the diff on the page.
(DIFF,) = (block for block in find_blocks("diff") if block.page == PAGE)
PORTS = ("12355", "2345", "29500")
# Both import torchvision where it is installed, and here it need not fit torch: see plugin_program.py.
PLUGIN_PROGRAM = str(Path(__file__).with_name("plugin_program.py"))
FABRIC = f"""#!{sys.executable}
import sys
from dualdist.utils.torchvision_import import load_torchvision
load_torchvision()
from lightning.fabric.cli import _main
sys.argv[0] = "fabric"
_main()
"""


def needed(line: str) -> str | None:
    """Return the library that a line needs."""
    return next((library for word, library in LIBRARIES.items() if re.search(rf"\b(with_)?{word}\b", line)), None)


def write(launch: Launch, line: str = "") -> None:
    """Write the page's programs, with free ports instead of fixed ones; `line` is after or before the diff."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    for name, text in PROGRAMS.items():
        if line and LINES[line].line > DIFF.line and name == "overwrites.py":
            before, after = (re.findall(rf"^\{sign}(.*)$", DIFF.text, re.MULTILINE) for sign in "-+")
            for old, new in zip(before, after, strict=True):
                assert old in text
                text = text.replace(old, new)
        for fixed in PORTS:
            text = text.replace(f'"{fixed}"', f'"{port}"')
        launch.write(name, text)
    for name in PLUGINS:
        shutil.copy(ROOT / "examples" / "plugins" / name, launch.directory / name)


def run_line(launch: Launch, line: str, env: Mapping[str, str]) -> None:
    library = needed(line)
    if library is not None and find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install 'dualdist[plugins]'")
    write(launch, line)
    words = [word for each in shlex.split(line) for word in ([PLUGIN_PROGRAM, each] if each in PLUGINS else [each])]
    fabric = stand_in(launch, "fabric", FABRIC) if words[0] == "fabric" else {}
    printed = launch(words, env={**AS_ROOT, **env, **fabric}, timeout_s=200).stdout
    met = re.findall(r"(\d) ranks(?: met|, loss)", printed)
    assert set(met) == {"1" if "--cpu" in line else "2"}, printed
    assert len(met) == (2 if "reads" in line or "overwrites" in line or "asks" in line else 1), printed


@pytest.mark.parametrize("line", [line for line in LINES if not line.startswith("srun ")])
def test_a_line_runs(launch: Launch, line: str) -> None:
    run_line(launch, line, {})


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("srun ")])
def test_a_line_runs_under_slurm(slurm: Slurm, launch: Launch, line: str) -> None:
    run_line(launch, line, slurm.env)


def test_the_centres_job_script_runs_as_it_is(slurm: Slurm, launch: Launch) -> None:
    write(launch)
    (script,) = (block for block in find_blocks("sh") if block.page == PAGE)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        text = script.text.replace("29500", str(listener.getsockname()[1]))
    outcome = launch([*slurm.sbatch("-N2", "-n2"), launch.write("job.sh", text)], env=slurm.env)
    assert str(outcome).count("2 ranks met") == 2, str(outcome)


def test_a_script_that_overwrites_the_address_of_torchruns_store_does_not_meet(launch: Launch) -> None:
    write(launch)
    text = PROGRAMS["overwrites.py"].replace(
        '"gloo", ', '"gloo", timeout=__import__("datetime").timedelta(seconds=5), '
    )
    outcome = launch([*TORCHRUN, launch.write("short.py", text)], check=False)
    assert outcome.rc != 0, str(outcome)
    assert "ranks met" not in outcome.stdout


def test_a_script_that_asks_mpi_is_a_job_of_one_rank_without_mpirun(launch: Launch) -> None:
    write(launch)
    assert launch([sys.executable, "asks_mpi.py"], env=of_pypis_mpich()).stdout == "1 ranks met\n"
