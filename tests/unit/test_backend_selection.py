"""Which backend and controller are chosen: from the environment, and by choices that `dualdist compare` saved."""

import os
import random
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comparisons import launch, launches

from dualdist.backends import registry
from dualdist.backends.base import InitContext
from dualdist.backends.horovod import select_controller
from dualdist.bench.compare.launches import Launch
from dualdist.bench.compare.verdict import choices_to_save
from dualdist.errors import UnsupportedError, UsageError
from dualdist.rendezvous.backend_selection import (
    check_choice,
    default_backend,
    matching_choice,
    select_backend,
)
from dualdist.rendezvous.connect import connect_ranks
from dualdist.rendezvous.records import RendezvousStore, Request
from dualdist.topology import Topology
from dualdist.utils import saved_choices as choices
from dualdist.utils.saved_choices import ChoiceConditions, SavedChoice


def topology(launcher: str, size: int = 2, *, mpi: bool = False) -> Topology:
    return Topology(0, size, 0, size, 0, 1, launcher, "X", mpi=mpi)


@pytest.mark.parametrize("launcher", ["none", "torchrun", "srun", "spawn", "env", "override", "flux", "horovodrun"])
def test_each_launcher_has_its_backend_unless_one_is_asked_for(launcher: str) -> None:
    expected = {"none": "single", "horovodrun": "horovod"}.get(launcher, "native")
    assert select_backend("auto", topology(launcher)) == expected
    for asked in ("native", "horovod", "mpi"):
        assert select_backend(asked, topology(launcher)) == asked


@pytest.mark.parametrize(
    ("horovod", "mpi4py", "gpu", "expected"),
    [
        (True, True, True, "horovod"),
        (True, True, False, "horovod"),
        (False, True, False, "mpi"),
        (False, True, True, "native"),
        (False, False, False, "native"),
    ],
)
def test_mpirun_means_mpi_where_it_helps(horovod: bool, mpi4py: bool, gpu: bool, expected: str) -> None:
    assert default_backend("mpirun", lambda: (horovod, mpi4py, gpu))[0] == expected


@pytest.mark.parametrize(
    ("transport", "environ", "mpi", "size", "expected"),
    [
        pytest.param("", {}, False, 2, "gloo", id="no MPI started"),
        pytest.param("gloo", {}, True, 2, "gloo", id="asked for"),
        pytest.param("mpi", {}, True, 2, "mpi", id="asked for and started"),
        pytest.param("", {"HOROVOD_CONTROLLER": "gloo"}, True, 2, "gloo", id="by Horovod's own variable"),
        pytest.param("mpi", {"HOROVOD_CONTROLLER": "gloo"}, True, 2, "mpi", id="ours before Horovod's"),
        pytest.param("mpi", {}, False, 1, "mpi", id="an MPI of one starts itself"),
        pytest.param("nccl", {}, False, 2, "gloo", id="NCCL needs a controller too"),
    ],
)
def test_horovods_controller(transport: str, environ: dict[str, str], mpi: bool, size: int, expected: str) -> None:
    """faults/test_bad_input.py asks for MPI under torchrun."""
    context = InitContext(topology("X", size, mpi=mpi), environ, transport, torch.device("cpu"), 5.0, "key")
    assert select_controller(context) == expected


def test_a_wrong_choice_lists_the_valid_ones() -> None:
    with pytest.raises(UsageError, match=r"'gloom'.* gloo, mpi .*DUALDIST_TRANSPORT\); did you mean 'gloo'"):
        check_choice("gloom", ("gloo", "mpi"), "transport", "DUALDIST_TRANSPORT")
    for transport in ("nccl", "gloo"):
        with pytest.raises(
            UsageError, match=rf"{transport}. is a transport, of native and horovod.*dd.init\('native'\)"
        ):
            check_choice(transport, registry.choices(), "backend", "DUALDIST_BACKEND")


HERE = ChoiceConditions.here("cpu", "torchrun", 2, threads=1, mpi=False)
SAVED = SavedChoice(HERE, "horovod", "gloo", "2026-01-01", "1.31x faster than native over shm (torchrun)")
JOB = Topology(0, 2, 0, 2, 0, 1, "torchrun", "a test")


def of(label: str, seconds: float, launcher: str, backend: str, transport: str) -> list[Launch]:
    place = {"launcher": launcher, "backend": backend, "transport": transport, "mpi": launcher == "mpirun"}
    return [launch(label, number, seconds + number / 1000, **place) for number in range(7)]


def test_every_launcher_that_started_several_has_its_fastest_saved() -> None:
    contenders = {
        "a": of("a", 1.0, "torchrun", "native", "shm"),
        "b": of("b", 1.5, "torchrun", "horovod", "gloo"),
        "c": of("c", 1.2, "mpirun", "horovod", "mpi"),
        "d": of("d", 0.5, "mpirun", "mpi", "mpi"),
        "e": of("e", 0.1, "srun", "native", "shm"),
    }
    torchrun, mpirun, srun = choices_to_save(contenders, "today")
    assert isinstance(torchrun, SavedChoice)
    assert isinstance(mpirun, SavedChoice)
    assert (torchrun.conditions, torchrun.backend, torchrun.transport) == (HERE, "native", "shm")
    assert torchrun.why == "1.50x faster than b"
    assert (mpirun.conditions.launcher, mpirun.conditions.mpi, mpirun.backend) == ("mpirun", True, "mpi")
    assert "e is its only candidate" in str(srun)


def test_a_choice_is_saved_by_kind_of_allocation_and_hosts_that_differ_save_none() -> None:
    def contenders(**second: Any) -> Mapping[str, list[Launch]]:
        found = {}
        for name, seconds in (("a", 1.0), ("b", 1.5)):
            each = [launch(name, number, seconds + number / 1000, num_nodes=2) for number in range(7)]
            found[name] = [replace(one, ranks=[one.ranks[0], replace(one.ranks[1], **second)]) for one in each]
        return found

    (saved,) = choices_to_save(contenders(node_rank=1), "today")
    assert isinstance(saved, SavedChoice)
    assert (saved.conditions, saved.conditions.hosts) == (replace(HERE, local_ranks=1), 2)
    assert "2 ranks of 1 thread on 2 hosts, each with " in str(saved.conditions)
    for line in choices_to_save(contenders(node_rank=1, processor="another"), "today"):
        assert str(line).startswith("nothing saved of ")
        assert "its hosts differ" in str(line)


@pytest.mark.smoke("abc-6", "ab-6")
@pytest.mark.parametrize(("names", "runs"), [("ab", 6), ("abc", 6), ("abc", 7), ("abcd", 8), ("abcdef", 10)])
def test_of_several_that_are_the_same_chance_saves_none(names: str, runs: int) -> None:
    """The fastest and the slowest of several always differ; with 15 or more of 200 a rate of 5% would be found out in
    92 of 100 cases.
    """
    draw = random.Random(0)
    drawn = (
        {name: launches(name, [0.1 * draw.gauss(1, 0.02) for _ in range(runs)]) for name in names} for _ in range(200)
    )
    assert sum(isinstance(told, SavedChoice) for each in drawn for told in choices_to_save(each, "today")) <= 14


def test_no_difference_saves_nothing_and_more_candidates_need_more_runs() -> None:
    same = {"a": launches("a", [1.0, 1.1] * 4), "b": launches("b", [1.1, 1.0] * 4)}
    assert "no significant difference" in next(choices_to_save(same, "today"))  # type: ignore[operator]

    def told(names: str, runs: int) -> SavedChoice | str:
        contenders = {name: launches(name, [place] * runs) for place, name in enumerate(names, 1)}
        return next(choices_to_save(contenders, "today"))

    for count, needed in ((2, 6), (3, 7), (4, 8), (5, 9)):
        assert str(told("abcde"[:count], needed - 1)).endswith(f"{count} candidates need {needed} launches of each")
        assert isinstance(told("abcde"[:count], needed), SavedChoice)


def test_a_file_keeps_one_choice_for_the_same_conditions_and_what_is_no_file_none(tmp_path: Path) -> None:
    path = tmp_path / "a" / "choices.json"
    assert choices.load_choices(path) == []
    other = replace(SAVED, conditions=replace(HERE, ranks=4))
    choices.save_choices(path, [SAVED, other])
    newer = replace(SAVED, backend="native", transport="shm")
    choices.save_choices(path, [newer])
    assert choices.load_choices(path) == [other, newer]
    assert [each.name for each in path.parent.iterdir()] == ["choices.json"]
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "link")
    for name in ("pipe", "link", "none", "pipe/choices.json", "."):
        assert choices.load_choices(tmp_path / name) == []
    assert choices.choices_path({"XDG_CONFIG_HOME": "/c"}) == Path("/c/dualdist/choices.json")
    assert choices.choices_path({"HOME": "/h"}) == Path("/h/.config/dualdist/choices.json")


@pytest.mark.parametrize("text", ["{}", '{"schema": 2, "choices": []}', '{"schema": 4, "choices": []}'])
def test_a_damaged_file_ends_no_job_and_is_named(tmp_path: Path, text: str) -> None:
    """faults/test_malformed.py damages more."""
    told: list[str] = []
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    path = choices.choices_path(environ)
    path.parent.mkdir()
    path.write_text(text)
    for job in (replace(JOB, launcher="none"), JOB):
        assert matching_choice(job, "gloo", environ, told.append) is None
    (line,) = told
    assert re.match(rf"{path}: these saved choices cannot be read \(.*\): delete the file", line)


Save = Callable[..., tuple[SavedChoice, dict[str, str]]]


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Save:
    """Save a choice for this host; return it, and the variables with which it is found."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}

    def write(**fields: Any) -> tuple[SavedChoice, dict[str, str]]:
        saved = replace(SAVED, **{"conditions": replace(HERE, threads=torch.get_num_threads()), **fields})
        choices.save_choices(choices.choices_path(environ), [saved])
        return saved, environ

    return write


@pytest.mark.parametrize(
    ("package", "backend", "transport", "why"),
    [
        ("horovod", "horovod", "gloo", "Horovod is not installed"),
        ("mpi4py", "mpi", "mpi", "mpi4py is not installed"),
        ("rdma", "rdma", "gloo", "there is no backend 'rdma' over 'gloo' in this Python"),
        ("rdma", "native", "tcp", "there is no backend 'native' over 'tcp' in this Python"),
    ],
)
def test_a_choice_of_what_this_python_lacks_is_not_taken_and_says_so(
    save: Save, monkeypatch: pytest.MonkeyPatch, package: str, backend: str, transport: str, why: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    _, environ = save(backend=backend, transport=transport)
    told: list[str] = []
    assert matching_choice(JOB, "", environ, told.append) is None
    (line,) = told
    assert line.startswith(f"{backend} over {transport}, as dualdist compare found on 2026-01-01: ")
    assert f"; not taken: {why}" in line


def test_a_choice_counts_only_where_all_is_as_it_was() -> None:
    def found(job: Topology, device: str = "cpu", saved: SavedChoice = SAVED, threads: int = 1) -> SavedChoice | None:
        return choices.find_choice([saved], job, device, threads) if choices.is_applicable(job) else None

    assert found(JOB) == SAVED
    assert found(replace(JOB, launcher="mpirun")) is None
    assert found(replace(JOB, size=3, local_size=3)) is None
    assert found(replace(JOB, mpi=True)) is None
    assert found(JOB, "H200") is None
    two_hosts = replace(JOB, size=4, num_nodes=2)  # of two ranks each
    assert found(two_hosts) is None
    by_host = replace(SAVED, conditions=replace(HERE, ranks=4))
    assert found(two_hosts, saved=by_host) == by_host
    assert found(replace(JOB, size=4, local_size=4), saved=by_host) is None
    assert found(replace(JOB, size=3, num_nodes=2), saved=replace(by_host, conditions=replace(HERE, ranks=3))) is None
    assert found(replace(JOB, num_nodes=2, local_size=1)) is None
    assert found(replace(JOB, inferred=frozenset({"local_size", "num_nodes"}))) is None  # who knows?
    for changed in (replace(HERE, processor="another"), replace(HERE, cores=HERE.cores + 1)):
        assert found(JOB, saved=replace(SAVED, conditions=changed)) is None


def test_a_choice_for_other_threads_alone_is_told_and_one_for_these_goes_before_it(save: Save) -> None:
    threads = torch.get_num_threads()
    _, environ = save(conditions=replace(HERE, threads=threads + 2))
    told: list[str] = []
    assert matching_choice(JOB, "", environ, told.append) is None
    (line,) = told
    assert f"not taken: ranks had {threads + 2} threads there, and have {threads} thread" in line
    assert line.endswith(f"OMP_NUM_THREADS={threads + 2} takes it")
    assert matching_choice(replace(JOB, launcher="mpirun"), "", environ, told.append) is None
    assert len(told) == 1
    own, _ = save(backend="native")
    assert matching_choice(JOB, "", environ, told.append) == own


def test_a_choice_that_fails_is_named(save: Save) -> None:
    """The backend's own error does not say why it was taken."""
    _, environ = save(backend="mpi", transport="mpi")
    told: list[str] = []
    config = Request(JOB, environ, "", "key", 5.0, RendezvousStore())
    with pytest.raises(UnsupportedError, match="MPI was not started by torchrun"):
        connect_ranks("auto", config, told.append)
    (line,) = told
    assert line.startswith("mpi over mpi, as dualdist compare found on 2026-01-01")
    assert line.endswith("; it fails here")
