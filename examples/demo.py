"""Trains examples/train.py on native and Horovod under torchrun, horovodrun and mpirun; compares the results.

    python examples/demo.py                         all runs
    python examples/demo.py --only mpirun           those whose name contains it
    python examples/demo.py --steps 200 --ranks 4

Runs on the CPU, where two ranks must end with the same parameters to the last bit, whatever moved the gradients. With
more ranks each backend adds up in an order of its own, and the last bits may differ. Ends with 1 where a run failed, or
where the hashes of two ranks differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from common.help import parser as parser_of
from dualdist.errors import DualdistError, LaunchError
from dualdist.launch.execute import find_site, run_command
from dualdist.launch.job import Job, Site
from dualdist.launch.launchers import build_command

TRAIN = Path(__file__).with_name("train.py")
BATCH = 8  # per rank; plain python takes the batches of all ranks together
# No GPU, one thread per rank; and ranks that wait in Open MPI, which spin, yield: cores are scarce on small machines.
VARIABLES = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}


@dataclass(frozen=True)
class Run:
    """One line of the table."""

    launcher: str
    backend: str

    @property
    def name(self) -> str:
        return f"{self.launcher}/{self.backend}"


RUNS = (
    Run("python", "auto"),
    Run("torchrun", "native"),
    Run("torchrun", "horovod"),
    Run("horovodrun", "native"),
    Run("horovodrun", "horovod"),
    Run("horovodrun-mpi", "horovod"),
    Run("mpirun", "native"),
    Run("mpirun", "horovod"),
)


def main() -> int:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    site, began = find_site(), time.monotonic()
    results: dict[Run, dict[str, Any] | str] = {}
    with tempfile.TemporaryDirectory(prefix="dualdist-demo-") as folder:
        for number, chosen in enumerate(options.runs, 1):
            console.print(f"[{number}/{len(options.runs)}] {chosen.name} ...", markup=False, end=" ")
            started = time.monotonic()
            try:
                results[chosen] = train(chosen, site, options, Path(folder, f"{number}.json"))
                outcome = "done"
            except DualdistError as error:
                results[chosen], outcome = str(error), "FAILED"
            console.print(f"{outcome} in {time.monotonic() - started:.0f} s")
    console.print(table_of(results))
    console.print(
        "One short run each tells no speed, and plain python has a whole machine: `dualdist compare` tells it."
    )
    return verdict(results, options, time.monotonic() - began, console)


def train(chosen: Run, site: Site, options: argparse.Namespace, file: Path) -> dict[str, Any]:
    """Run one training and return its summary; LaunchError carries the end of what it printed."""
    ranks = 1 if chosen.launcher == "python" else options.ranks
    flags = {"model": options.model, "batch-size": BATCH * options.ranks // ranks, "clip": 1, "summary": file}
    flags |= {"epochs": options.steps, "max-steps": options.steps}
    program = (str(TRAIN), *(f"--{name}={value}" for name, value in flags.items()))
    job = Job(program, ranks, chosen.backend, env=VARIABLES)
    command = build_command(chosen.launcher, job, site)
    code, output = run_command(command, timeout_s=options.timeout, what=chosen.name)
    if code != 0 or not file.exists():
        raise LaunchError(f"exit code {code}\n{output.strip()[-3000:]}")
    summary: dict[str, Any] = json.loads(file.read_text())
    if summary["ranks"] != ranks or chosen.backend not in ("auto", summary["backend"]):
        raise LaunchError(f"ran {summary['ranks']} ranks on {summary['backend']}, not {ranks} on {chosen.backend}")
    return summary


def table_of(results: dict[Run, dict[str, Any] | str]) -> Table:
    table = Table("launcher", "backend", "transport", "ranks", "images/s", "loss", "accuracy", "parameter hash")
    for column in table.columns[3:7]:
        column.justify = "right"
    for done, summary in results.items():
        if isinstance(summary, str):
            table.add_row(done.launcher, done.backend, *[""] * 5, f"[red]FAILED: {escape(reason_in(summary))}[/red]")
            continue
        numbers = (f"{summary['images_per_s']:.0f}", f"{summary['loss']:.4f}", f"{summary['accuracy']:.4f}")
        places = (done.launcher, summary["backend"], summary["transport"], str(summary["ranks"]))
        table.add_row(*places, *numbers, summary["parameter_hash"][:16])
    return table


def reason_in(output: str) -> str:
    """The line that most likely says why."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error: " in line or "error: " in line), lines[-1])[:200]


def verdict(
    results: dict[Run, dict[str, Any] | str], options: argparse.Namespace, total_s: float, console: Console
) -> int:
    """Print what came out, loudly, and return the exit code."""
    failed = {done.name: summary for done, summary in results.items() if isinstance(summary, str)}
    for name, output in failed.items():
        console.rule(f"{name} failed")
        console.print(output, markup=False)
    hashes = {
        done.name: summary["parameter_hash"][:16]
        for done, summary in results.items()
        if isinstance(summary, dict) and summary["ranks"] > 1
    }
    same = len(set(hashes.values())) <= 1
    if hashes and same:
        text = f"THE SAME PARAMETERS TO THE LAST BIT: {len(hashes)} runs, {options.ranks} ranks, {options.steps} steps"
        console.print(f"[bold green]{text}[/]")
    elif hashes:
        common = Counter(hashes.values()).most_common(1)[0][0]
        odd = ", ".join(name for name, value in hashes.items() if value != common)
        style = "bold white on red" if options.ranks == 2 else "yellow"
        console.print(f"[{style}]THE PARAMETERS DIFFER with {options.ranks} ranks: {odd} from {common}[/]")
    if failed:
        console.print(f"[bold white on red]{len(failed)} OF {len(results)} RUNS FAILED: {', '.join(failed)}[/]")
    console.print(f"{len(results)} runs in {total_s:.0f} s")
    return 1 if failed or (not same and options.ranks == 2) else 0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="how many each run has")
    parser.add_argument("--steps", type=int, default=50, help="steps that each run trains")
    parser.add_argument("--model", default="resnet18", help="as for train.py")
    parser.add_argument("--only", action="append", metavar="NAME", help=", ".join(each.name for each in RUNS))
    parser.add_argument("--timeout", type=float, default=300, help="seconds that one run may take")
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error(f"--ranks {options.ranks}: expected 2 or more")
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: expected 1 or more")
    options.runs = [each for each in RUNS if not options.only or any(name in each.name for name in options.only)]
    if not options.runs:
        parser.error(f"--only {' '.join(options.only)}: expected a part of {', '.join(each.name for each in RUNS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
