"""`dualdist compare` with real launches: metrics, equivalence, output, resuming, and invalid arguments."""

import html
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from harness.base_env import ROOT
from harness.effort import Effort
from harness.jobs import Launch, Outcome
from harness.mpi import OpenMPI
from launch.running import TORCHRUN, check_refused, commands, interrupted, need_slow_link

from dualdist.utils import saved_choices
from dualdist.utils.saved_choices import ChoiceConditions, SavedChoice

COMPARE = (sys.executable, "-m", "dualdist", "compare")
# The manual's lines; tests append options that make them short.
SHOWN = commands(ROOT / "docs/pages/guides/comparing-backends.md", "dualdist compare")
OF_MODEL, OF_SCRIPT = (next(words[2:] for words in SHOWN if option in words) for option in ("--model", "--script"))
QUICK = ("--model", "mlp", "--batch", "8", "--steps", "8", "--warmup", "2", "--transports", "gloo", "--device", "cpu")
SCRIPTS = ("--launchers", "mpirun", "--transports", "gloo", "--device", "cpu", "--baselines", "")

SCRIPT = """
import random, sys
import torch
import dualdist as dd
dd.init()
torch.manual_seed(0 if sys.argv[1] == "seeded" else random.SystemRandom().getrandbits(32))
model = torch.nn.Linear(8, 1)
dd.broadcast_parameters(model)
optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
try:
    while True:
        x = torch.randn(4, 8)
        loss = (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
finally:
    dd.shutdown()
"""
HOROVOD_SCRIPT = """
import torch
import horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(8, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(6):
    optimizer.zero_grad()
    (model(torch.ones(4, 8)) - 1).square().mean().backward()
    optimizer.step()
"""


class Compared:
    """One comparison, with its output."""

    def __init__(self, outcome: Outcome, folder: Path) -> None:
        self.outcome, self.folder = outcome, folder
        self.kept = json.loads((folder / "kept.json").read_text())
        self.result = self.kept["results"]
        self.contenders = {contender["label"]: contender for contender in self.result["contenders"]}


@pytest.fixture(scope="module")
def compared(
    base_env: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory, _orphans_stay_ours: None
) -> Compared:
    """Horovod over Gloo, the same again and at half its speed, all baselines; each launched once."""
    folder = tmp_path_factory.mktemp("compared")
    words = ("-np", "2", "--backends", "horovod", "--transports", "gloo,nccl", "--rounds", "1", "--self-check", "100")
    files = ("--json", "kept.json", "--save-choice")
    env = {"XDG_CONFIG_HOME": str(folder / "config")}
    outcome = Launch(base_env, folder)([*COMPARE, *OF_MODEL, *QUICK, *words, *files], env=env, timeout_s=240)
    return Compared(outcome, folder)


OWN = "horovod over gloo (torchrun)"
AGAIN, SLOWED = "horovod over gloo (torchrun, again)", "horovod over gloo (torchrun, slowed by 100%)"
DDP, RAW = "DDP over gloo (torchrun)", "raw Horovod over gloo (torchrun)"


def test_contenders_and_baselines_are_launched_and_the_others_listed_with_the_reason(compared: Compared) -> None:
    assert set(compared.contenders) == {OWN, AGAIN, SLOWED, DDP, RAW, "no communication", "one rank"}
    (refused,) = compared.result["refused"]
    assert refused["contender"]["config"] == {"backend": "horovod", "transport": "nccl", "launcher": "torchrun"}
    assert "nccl needs GPU tensors" in refused["reason"]
    assert compared.result["ended"] == "complete"


def test_all_trained_the_same_model_bit_identically(compared: Compared) -> None:
    same = compared.result["equivalence"]
    assert (same["criterion"], same["mismatches"], same["steps"], same["launches"]) == ("bit-identical", {}, 10, 5)
    training = [job for job in compared.kept["jobs"] if job["contender"].split("-")[0] not in ("none", "one")]
    assert len({rank["digest"] for job in training for rank in job["ranks"]}) == 1
    assert len({tuple(rank["losses"]) for job in training for rank in job["ranks"] if rank["rank"] == 0}) == 1
    losses = training[0]["ranks"][0]["losses"]
    assert losses[8] < losses[0]  # the first batch, a second time


def test_every_metric_is_measured(compared: Compared) -> None:
    for label, contender in compared.contenders.items():
        ranks = 1 if label == "one rank" else 2
        assert contender["launches"] == 1
        assert contender["samples_per_s"]["value"] == pytest.approx(4 * ranks / contender["step_s"]["value"])
        assert len(contender["samples_per_s_by_rank"]) == ranks
        assert 0 < contender["init_s"] < contender["startup_s"] < 60
        assert 100 << 20 < contender["peak_bytes"] < 2 << 30
        assert contender["device_peak_bytes"] is None
        assert contender["cpu_s"] > 0
        assert (contender["scaling_efficiency"] is None) == (label == "one rank")
        assert (contender["exposed_s"] is None) == (label in ("one rank", "no communication"))
    own = compared.contenders[OWN]
    assert [point["nbytes"] for point in own["bandwidth"]] == [8, 4096, 65536, 1 << 20, 8 << 20]
    assert 0 < own["latency_s"] < 0.1
    assert own["bus_gb_s"] > 0
    # Two ranks over Gloo send each other every gradient once, 416,000 floats, of which the last ones may not have been
    # confirmed yet; without communication nothing travels.
    for label in (OWN, AGAIN, SLOWED, DDP, RAW):
        assert 0.95 * 4 * 416000 < compared.contenders[label]["tcp_bytes"] < 1.1 * 4 * 416000
    assert compared.contenders["no communication"]["tcp_bytes"] < 1000


def test_a_self_check_launches_a_copy_and_a_slowed_contender(compared: Compared) -> None:
    assert compared.result["verdict"] == {
        "kind": "alone",
        "sentence": f"{OWN} is the only candidate that ran here",
        "winner": OWN,
        "runner_up": None,
        "ratio": None,
    }
    own, slowed = compared.contenders[OWN], compared.contenders[SLOWED]
    # Its steps take twice as long, and it works all the while; a loaded machine may hide one of the two.
    assert slowed["step_s"]["value"] > 1.3 * own["step_s"]["value"] or slowed["cpu_s"] > 1.2 * own["cpu_s"]
    assert f"{OWN} is its only candidate" in compared.outcome.stderr
    assert not (compared.folder / "config" / "dualdist").exists()


def test_progress_shows_launches_done_and_time_left(compared: Compared) -> None:
    lines = [line for line in compared.outcome.stderr.splitlines() if line.startswith("[")]
    assert [line.split("]")[0] for line in lines] == [f"[{number}/7" for number in range(8)]
    assert all("left)" in line for line in lines)


def test_the_page_needs_no_other_file(compared: Compared) -> None:
    folder = compared.folder / "report"
    page = (folder / "report.html").read_text()
    links = re.findall(r"<[^>]* (?:src|href)=[\"']?([^\"' >]+)", page)
    assert len(links) == 4  # three pictures, and the data
    assert all(link.startswith("data:") for link in links)
    assert compared.result["verdict"]["sentence"] in page
    assert "<p>Yes: losses of 10 steps and parameters agree in 5 launches: bit-identical.</p>" in page
    for label in (*compared.contenders, "nccl needs GPU tensors", compared.kept["machine"]["processor"], "torch 2"):
        assert label in page
    assert all(shlex.split(job["command"])[-1] in html.unescape(page) for job in compared.kept["jobs"])
    for name in ("steps", "allreduce", "losses"):
        assert "<svg " in (folder / f"{name}.svg").read_text()
    assert json.loads((folder / "comparison.json").read_text())["results"] == compared.result


def test_beyond_two_ranks_bits_are_compared_in_launches_with_ordered_sums(launch: Launch, effort: Effort) -> None:
    """The default model, whose bits differ between shared memory and Gloo otherwise."""
    effort.require_long(unless=False)
    words = ("-np", "3", "--backends", "native", "--transports", "gloo,shm", "--device", "cpu")
    short = ("--baselines", "", "--rounds", "1", "--warmup", "1", "--steps", "2", "--json", "kept.json")
    outcome = launch([*COMPARE, *words, *short], timeout_s=400)
    kept = json.loads((launch.directory / "kept.json").read_text())
    assert [job["error"] for job in kept["jobs"]] == [None] * 4
    digests = {job["contender"]: {rank["digest"] for rank in job["ranks"]} for job in kept["jobs"]}
    plain = [f"dualdist-native-{name}-torchrun" for name in ("gloo", "shm")]
    assert len(set.union(*(digests.pop(f"{name}-ordered") for name in plain))) == 1
    assert digests.keys() == set(plain)
    assert digests[plain[0]] != digests[plain[1]]
    asked = [job["contender"] for job in kept["jobs"] if "DUALDIST_REDUCTION=ordered" in job["command"]]
    assert asked == [f"{name}-ordered" for name in plain]
    same = kept["results"]["equivalence"]
    names = ["native over gloo (torchrun)", "native over shm (torchrun)"]
    assert (same["same_bits"], same["mismatches"], same["unchecked"]) == (names, {}, {})
    assert {each["label"] for each in kept["results"]["contenders"]} == {*names}, "the checks are not timed"
    assert f"to the bit (ordered sums, checked in separate launches): {', '.join(names)}\n" in outcome.stdout
    assert "; 2 contenders gave the same bits (ordered sums, " in kept["results"]["verdict"]["sentence"]


def test_compression_pays_over_a_slow_link(launch: Launch, base_env: Mapping[str, str]) -> None:
    """A gradient of 1.7 MB needs 1.3 s at 10 Mbit/s; of rank 1, 100 matrices and vectors of 64 are 77 kB."""
    need_slow_link(base_env)
    words = ("--slow-link", "10mbit", "--backends", "native", "--compression", "powersgd:1", "--baselines", "")
    outcome = launch([*COMPARE, *QUICK, *words, "--rounds", "1", "--json", "kept.json"], timeout_s=400)
    assert outcome.left == ()
    kept = json.loads((launch.directory / "kept.json").read_text())
    found = {each["label"]: each for each in kept["results"]["contenders"]}
    whole, compressed = (found[f"native over gloo (torchrun{name})"] for name in ("", ", powersgd:1"))
    assert whole["sent_bytes"] == 100 * (64 * 64 + 64) * 4
    assert compressed["sent_bytes"] == 100 * ((64 + 64) * 1 + 64) * 4
    for each in (whole, compressed):  # and flags
        assert 0.95 * each["sent_bytes"] < each["tcp_bytes"] < 1.2 * each["sent_bytes"]
    assert whole["step_s"]["value"] > 0.9 * whole["sent_bytes"] * 8 / 10e6
    assert compressed["step_s"]["value"] < 0.5 * whole["step_s"]["value"]
    assert [job["ranks"][1]["node_rank"] for job in kept["jobs"]] == [1, 1]
    # It is no candidate, and need not train the same.
    assert (kept["results"]["verdict"]["kind"], kept["results"]["equivalence"]["launches"]) == ("alone", 1)


def test_an_interrupted_run_reports_its_launches(launch: Launch) -> None:
    words = [*COMPARE, *QUICK, "--backends", "native", "--baselines", "none", "--rounds", "1", "--output", "out"]
    outcome = interrupted(launch, words, "[1/2]")
    assert outcome.rc == 130, str(outcome)
    assert "launches  1, interrupted" in outcome.stdout
    assert outcome.left == ()
    assert {path.suffix for path in (launch.directory / "out").iterdir()} == {".html", ".json", ".svg"}


def test_a_script_is_timed_and_ended_after_its_steps(launch: Launch, openmpi: OpenMPI) -> None:
    launch.write("train.py", SCRIPT)
    words = (*SCRIPTS, "--backends", "native,horovod", "--rounds", "1", "--steps", "12")
    line = OF_SCRIPT[: OF_SCRIPT.index("--")]  # behind it stands what the script knows
    env = {"XDG_CONFIG_HOME": str(launch.directory / "config")}
    outcome = launch([*COMPARE, *line, *words, "--json", "-", "--", "seeded"], env=env)
    kept = json.loads(outcome.stdout)
    same = {"criterion": "bit-identical", "launches": 2, "steps": 15, "mismatches": {}}
    assert kept["results"]["equivalence"] == {**same, "same_bits": [], "unchecked": {}}
    assert kept["results"]["verdict"]["sentence"].startswith("1 launch is too few to compare")
    for job in kept["jobs"]:
        assert job["command"].endswith("train.py seeded")
        for rank in job["ranks"]:
            assert len(rank["ends"]) == len(rank["losses"]) == 15
            assert rank["losses"][0] > 0
    assert {contender["samples_per_s"] for contender in kept["results"]["contenders"]} == {None}  # its batch is unknown


def test_scripts_that_train_different_models_are_not_comparable(launch: Launch, openmpi: OpenMPI) -> None:
    script = launch.write("train.py", SCRIPT)
    words = (*SCRIPTS, "--backends", "native", "--rounds", "2", "--steps", "3")
    outcome = launch([*COMPARE, *words, "--script", script, "--", "unseeded"], check=False)
    assert outcome.rc == 1
    assert "INVALID: the contenders did not train the same model" in outcome.stdout
    assert "had a different loss at step 1" in outcome.stdout


def test_a_horovod_script_that_ends_early_is_timed_until_then(launch: Launch) -> None:
    launch.write("hvd.py", HOROVOD_SCRIPT)
    words = ("--backends", "native", "--transports", "gloo", "--rounds", "1", "--baselines", "", "--device", "cpu")
    outcome = launch([*COMPARE, *words, "--as-horovod", "--script", "hvd.py", "--json", "-"])
    (job,) = json.loads(outcome.stdout)["jobs"]
    assert "-m dualdist.hvd hvd.py" in job["command"]
    assert [len(rank["ends"]) for rank in job["ranks"]] == [6, 6]


@pytest.mark.smoke
def test_a_script_without_steps_is_listed_with_the_reason(launch: Launch) -> None:
    launch.write("train.py", "print('done')")
    words = ("--backends", "native", "--transports", "gloo", "--launchers", "torchrun,spawn", "--baselines", "")
    outcome = launch([*COMPARE, *words, "--device", "cpu", "--script", "train.py"], check=False)
    assert outcome.rc == 1
    assert "does the script call dd.wrap_optimizer?" in outcome.stdout
    assert "a script does not spawn its ranks" in outcome.stdout
    assert "verdict   Nothing was measured\n          no candidate completed a launch" in outcome.stdout


def choice(backend: str) -> SavedChoice:
    here = ChoiceConditions.here("cpu", "torchrun", 2, threads=1, mpi=False)
    return SavedChoice(here, backend, "gloo", "2026-01-01", "1.31x faster than another")


@pytest.fixture
def config(launch: Launch) -> Iterator[dict[str, str]]:
    """Yield variables of a user whose saved choice differs from that of auto."""
    env = {"XDG_CONFIG_HOME": str(launch.directory / "config"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    saved_choices.save_choices(saved_choices.choices_path(env), [choice("horovod")])
    yield env
    assert "XDG_CONFIG_HOME" not in os.environ or os.environ["XDG_CONFIG_HOME"] != env["XDG_CONFIG_HOME"]


TELL = """
import sys
import dualdist as dd
for asked in ("auto", None, "native"):
    dd.init(asked)
    sys.stdout.write(f"{dd.backend()}/{dd.transport()} ")
    dd.shutdown()
"""


def test_auto_takes_the_saved_choice_and_logs_it_once(launch: Launch, config: dict[str, str]) -> None:
    outcome = launch([*TORCHRUN, launch.write("tell.py", TELL)], env=config)
    assert sorted(outcome.stdout.split()) == ["horovod/gloo"] * 4 + ["native/shm"] * 2
    assert outcome.stderr.count("dualdist: horovod over gloo, as dualdist compare found on 2026-01-01: 1.31x") == 1


def test_a_saved_transport_that_does_not_open_is_logged_with_the_one_used(
    launch: Launch, config: dict[str, str]
) -> None:
    without_gpu = replace(choice("native"), transport="nccl")
    saved_choices.save_choices(saved_choices.choices_path(config), [without_gpu])
    outcome = launch([*TORCHRUN, launch.write("tell.py", TELL)], env=config)
    assert set(outcome.stdout.split()) == {"native/shm"}
    (logged,) = [line for line in outcome.stderr.splitlines() if line.startswith("dualdist: ")]
    assert logged.startswith("dualdist: native over nccl, as dualdist compare found on 2026-01-01: ")
    assert logged.endswith("; here it runs over shm instead")


@pytest.mark.smoke
def test_dry_run_prints_every_launch_in_order_and_runs_nothing(launch: Launch) -> None:
    words = (*QUICK, "-np", "4", "--backends", "native", "--launchers", "torchrun,mpirun,python", "--baselines", "ddp")
    outcome = launch([*COMPARE, *words, "--rounds", "3", "--dry-run", "--output", "out"])
    lines = [shlex.split(line) for line in outcome.stdout.splitlines()]
    assert ["DUALDIST_REDUCTION=ordered" in line for line in lines] == [False] * 9 + [True] * 2
    assert all(line[0] == "env" and "dualdist.bench.ranks.worker" in line for line in lines)
    assert all(".dualdist-compare-" in " ".join(line) for line in lines)
    assert outcome.stderr.startswith("dualdist compare: not native over gloo (python): plain python starts one rank")
    assert not (launch.directory / "out").exists()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--budget", "soon"), "--budget soon: expected a time above 0, as 120s"),
        (("--batch", "7"), "--batch 7: expected a multiple of the 2 ranks"),
        (("-np", "1"), "--ranks 1: expected 2 or more"),
        (("--self-check", "0"), "--self-check 0: expected a percentage"),
        (("--as-horovod",), "are for a --script"),
        (("--script", "nowhere.py"), "there is no script 'nowhere.py'"),
        (("--device", "cuda"), "--device cuda, but torch sees no GPU here"),
        (("--output", "/proc/nowhere"), "--output /proc/nowhere: cannot be used (No such file or directory)"),
        (("--json", "/nowhere/x.json"), "--json /nowhere/x.json: there is no folder /nowhere; name another file"),
        (("--json", "/tmp"), "--json /tmp: this cannot be written; name another file"),
    ],
)
def test_invalid_arguments_are_refused_in_one_sentence(launch: Launch, words: tuple[str, ...], expected: str) -> None:
    device = () if "--device" in words else ("--device", "cpu")
    check_refused(launch, [*COMPARE, *words, *device], expected, {"CUDA_VISIBLE_DEVICES": ""})
