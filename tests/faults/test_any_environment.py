"""A rank joins its job in any environment, or ends in time with one of our errors."""

import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

import pytest
from harness.base_env import base_env
from harness.effort import Effort
from harness.jobs import Launch
from hypothesis import strategies as st

import dualdist as dd
from dualdist.backends.native import backend
from dualdist.bench import recording
from dualdist.doctor import facts
from dualdist.doctor.diagnosis import diagnose, to_json
from dualdist.errors import DualdistError
from dualdist.rendezvous import backend_selection, store_rendezvous

RECORDS = json.loads((Path(__file__).parents[1] / "unit" / "launcher_env.json").read_text())
TIMEOUT_S = 0.2
HANGS_S = 30
# Imported by init(), here once for all children.
LOADED = (backend_selection, backend, recording, store_rendezvous)
NO_STORE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
# Jobs whose other ranks do not exist. What MPI started, MPI itself refuses.
BASES = [
    {},
    {"RANK": "1", "WORLD_SIZE": "2", **NO_STORE},
    {"RANK": "0", "WORLD_SIZE": "1"},
    {"DUALDIST_RANK": "1", "DUALDIST_SIZE": "2", "DUALDIST_RENDEZVOUS": "file:///tmp/dualdist-absent"},
    {"DUALDIST_RANK": "1", "DUALDIST_SIZE": "2", "DUALDIST_ADDRESS": "127.0.0.1", "DUALDIST_PORT": "9"},
    *(
        {**RECORDS[name][-1]["env"], **NO_STORE}
        for name in ("torchrun", "slurm_srun-none_N2x2", "horovodrun_gloo_more")
    ),
]
OTHER_NAMES = """DUALDIST_BACKEND DUALDIST_LAUNCHER DUALDIST_LOCAL_RANK DUALDIST_LOCAL_SIZE DUALDIST_NODE_RANK
DUALDIST_NUM_NODES DUALDIST_OBSERVERS DUALDIST_RECORD DUALDIST_RECORD_STEPS DUALDIST_RECORD_WARMUP DUALDIST_RENDEZVOUS
DUALDIST_RENDEZVOUS_DIR DUALDIST_RUN DUALDIST_RUN_RESTART DUALDIST_TRANSPORT GLOO_SOCKET_IFNAME HOME HOROVOD_GLOO_IFACE
SLURM_SUBMIT_DIR TORCHELASTIC_RESTART_COUNT XDG_CONFIG_HOME"""
NAMES = sorted({name for env in BASES for name in env} | {*OTHER_NAMES.split()})
URLS = ["file:///tmp/none/at/all", "file:///dev/null", "file:///", "tcp://127.0.0.1:9", "tcp://[::1", "x"]
VALUES = st.one_of(
    st.sampled_from(["0", "1", "2", "3", "", "native", "horovod", "gloo", "shm", "nccl", "65536", "4294967290", "-1"]),
    st.sampled_from(URLS),
    st.sampled_from(["localhost", "256.1.1.1", "é", "\udcff", "a" * 300, "a..b", ".", "%", "2(x2),1", "t:1:127.0.0.1"]),
    st.text("0123456789x(),.-+_ a\u0663", max_size=6),
)


@st.composite
def environments(draw: st.DrawFn) -> dict[str, str]:
    env = {**draw(st.sampled_from(BASES)), **draw(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3))}
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=2)):
        env.pop(name, None)
    return env


def init_error(env: Mapping[str, str]) -> str:
    """Return "" if dd.init() succeeds with the environment, in a separate process, else its error."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(HANGS_S)
        os.environ.clear()
        os.environ.update(env)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        error = ""
        try:
            dd.init(timeout_s=TIMEOUT_S)
            dd.shutdown()
        except DualdistError as ours:
            error = f"{type(ours).__name__}: {ours}"
        except BaseException:
            error = traceback.format_exc()
        os.write(sender, (error or " ").encode(errors="replace")[:4000])
        os._exit(0)
    os.close(sender)
    with open(receiver, errors="replace") as file:
        error = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return error.strip() if error and status == 0 else f"the process ended by {status}, after {error!r}"


@pytest.mark.smoke
def test_any_environment_is_joined_or_refused(effort: Effort) -> None:
    clean = {name: value for name, value in base_env(os.environ).items() if name != "LD_PRELOAD"}
    assert init_error(clean) == ""

    def check(env: Mapping[str, str]) -> None:
        error = init_error(clean | env)
        assert not error or error.partition(":")[0].endswith("Error"), error
        assert "Traceback" not in error

    effort.fuzz("environments of dd.init()", environments(), check, 60)


def test_the_doctor_reports_in_any_environment(effort: Effort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "TOOL_TIMEOUT_S", 1.0)  # srun retries for longer where its configuration is missing
    effort.fuzz("environments of dualdist doctor", environments(), lambda env: json.dumps(to_json(diagnose(env))), 6)


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["a" * 300, "a..b", "\udcff", "1 2", ""])
@pytest.mark.parametrize("base", [1, 4, 7])
def test_an_invalid_host_name_is_refused(name: str, base: int) -> None:
    """Python refuses it before it asks a name service, by other errors."""
    clean, env = base_env(os.environ), BASES[base]
    variables = {each: name for each in env if each.endswith(("ADDR", "ADDRESS"))}
    error = init_error({**clean, **env, **variables})
    assert error.startswith(("RendezvousError: ", "TopologyError: ")), error


@pytest.mark.smoke
@pytest.mark.parametrize("place", ["json", "no_such_module:X", "json:loads", ":"])
def test_what_is_no_observer_is_refused(place: str) -> None:
    error = init_error({**base_env(os.environ), "DUALDIST_OBSERVERS": place})
    assert error.startswith(f"UsageError: DUALDIST_OBSERVERS: {place!r} "), error


@pytest.mark.smoke
@pytest.mark.parametrize("address", ["", "x", "t:99999:127.0.0.1", "t:9:" + "a" * 300])
def test_an_invalid_control_address_is_refused(launch: Launch, address: str) -> None:
    argv = [sys.executable, "-m", "dualdist.launch.rank", "-c", "print('it ran')"]
    outcome = launch(argv, env={"DUALDIST_RUN": address}, check=False)
    assert "Traceback" not in outcome.stderr, str(outcome)
    assert outcome.rc == 1
