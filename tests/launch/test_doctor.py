"""The doctor on hosts with real problems, such as low limits, another MPI or a broken torch, and inside Slurm."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from harness import mpi
from harness.hosts import ADDRESSES, SSHD_OPTIONS, Hosts
from harness.installed import lack
from harness.jobs import Job, Launch, Outcome
from harness.slurm import Slurm
from launch.running import stand_in

DOCTOR = (sys.executable, "-m", "dualdist", "doctor")


def found(outcome: Outcome) -> dict[str, dict[str, Any]]:
    """Return the findings of `--json -` by name, with the messages of equal names joined."""
    report = json.loads(outcome.stdout)
    worst = {"info": 0, "warning": 1, "error": 2}
    assert outcome.rc == max((worst[each["level"]] for each in report["findings"]), default=0), str(outcome)
    by_name: dict[str, dict[str, Any]] = {}
    for each in report["findings"]:
        before = by_name.get(each["name"], {"message": ""})["message"]
        by_name[each["name"]] = {**each, "message": f"{before}\n{each['message']}"}
    return by_name


def ask(launch: Launch, *words: str, before: Sequence[str] = (), env: dict[str, str] | None = None) -> dict[str, Any]:
    return found(launch([*before, *DOCTOR, *words, "--json", "-"], env=env or {}, check=False))


@pytest.mark.smoke
def test_a_host_with_low_limits(launch: Launch) -> None:
    """Mounts and host name of a namespace, real limits, and InfiniBand as the kernel shows it."""
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    script = (
        "mount -t tmpfs -o size=7m none /dev/shm && mount -t tmpfs none /sys/class && "
        "mkdir -p /sys/class/infiniband/mlx5_0 && hostname nobody-knows-me && ulimit -l 64 && ulimit -n 256 && "
        'exec "$@"'
    )
    before = ["unshare", "--mount", "--uts", "sh", "-c", script, "sh"]
    findings = ask(launch, "-np", "2", before=before, env={"OMP_NUM_THREADS": "1000", "GLOO_SOCKET_IFNAME": "ib7"})
    for name, words in (
        ("shm-too-small", "has 7 MiB free, but 2 ranks need at least 8 MiB"),
        ("too-few-files", "may open at most 256 files"),
        ("locked-memory", "may lock at most 0.0625 MiB"),
        ("locked-memory", "mlx5_0"),
        ("hostname-unresolved", "nobody-knows-me, does not resolve"),
        ("thread-oversubscription", "OMP_NUM_THREADS=1000"),
        ("interface-missing", "no interface ib7"),
    ):
        assert words in findings[name]["message"]
    assert findings["interface-missing"]["level"] == "error"


@pytest.mark.smoke
def test_an_mpirun_of_another_mpi_on_path(launch: Launch, mpich: mpi.MPICH, openmpi: mpi.OpenMPI) -> None:
    folder = launch.directory / "bin"
    folder.mkdir()
    (folder / "mpirun").symlink_to(Path(mpich.mpiexec).resolve())
    findings = ask(launch, env={"PATH": f"{folder}:{launch.env['PATH']}"})
    assert findings["two-mpis"]["level"] == "warning"
    assert f"mpirun is {folder}/mpirun (MPICH " in findings["two-mpis"]["message"]
    assert "mpiexec" in findings["two-mpis"]["message"]
    assert "mpi4py uses Open MPI v4" in findings["mpi4py-other-mpi"]["message"]
    assert "Horovod was built with Open MPI 4" in findings["horovod-other-mpi"]["message"]


def package(launch: Launch, folder: str, name: str, version: str, content: str = "") -> dict[str, str]:
    """Write a package, and return the PYTHONPATH on which it comes first."""
    launch.write(f"{folder}/{name}/__init__.py", content)
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    launch.write(f"{folder}/{name}-{version}.dist-info/METADATA", about)
    return {"PYTHONPATH": f"{launch.directory / folder}:{launch.env['PYTHONPATH']}"}


def test_a_torch_that_cannot_be_imported_and_a_torchvision_of_another(launch: Launch) -> None:
    """The doctor itself needs neither."""
    broken = "raise ImportError('libcudart.so.12: cannot open shared object file')"
    findings = ask(launch, env=package(launch, "a", "torch", "2.13.0+cu126", broken))
    assert "libcudart.so.12: cannot open shared object" in findings["torch-broken"]["message"]
    assert findings["torch-broken"]["level"] == "error"
    assert "horovod-other-torch" in findings
    launch.write("c/torchvision/_C.so", "not a library")
    finding = ask(launch, env=package(launch, "c", "torchvision", "0.28.0"))["torchvision-operators"]
    assert "torchvision 0.28.0 do not load with torch" in finding["message"]
    assert "pip install --no-deps --force-reinstall 'torchvision" in finding["fix"]


FOREIGN_HOROVOD = """
import sys, types
built = {"gloo_built": lambda: False, "mpi_built": lambda: True, "nccl_built": lambda: 21805}
torch = sys.modules["horovod.torch"] = types.SimpleNamespace(**built)
"""


def test_a_foreign_horovod_is_imported_for_its_build_options(launch: Launch) -> None:
    env = package(launch, "a", "horovod", "0.28.1", FOREIGN_HOROVOD)
    outcome = launch([*DOCTOR, "--json", "-"], env=env, check=False)
    horovod = json.loads(outcome.stdout)["backends"]["horovod"]
    assert (horovod["gloo"], horovod["mpi"], horovod["nccl"]) == (False, True, "21805"), str(outcome)
    assert "horovod-without-gloo" in found(outcome)


def test_the_horovod_probe_agrees_with_the_build_record(launch: Launch) -> None:
    program = (
        "from os import environ; from dualdist.doctor.facts import HOROVOD_PROGRAM, run_probe; "
        "print(run_probe(HOROVOD_PROGRAM, environ, 120))"
    )
    assert launch([sys.executable, "-c", program]).stdout == "{'gloo': True, 'mpi': True, 'nccl': None}\n"


def test_a_python_without_packages(launch: Launch) -> None:
    """-S disables site-packages: no torch, no Horovod, no mpi4py, only dualdist's source."""
    outcome = launch([sys.executable, "-S", *DOCTOR[1:], "--json", "-"], check=False)
    findings = found(outcome)
    assert {"torch-missing", "horovod-missing"} <= findings.keys()
    assert findings["torch-missing"]["level"] == "error"
    assert json.loads(outcome.stdout)["backends"]["native"]["available"] is False


def test_run_tests_every_usable_configuration(launch: Launch) -> None:
    """With real ranks; skipped configurations have a reason."""
    words = ("--run", "-np", "2", "--launchers", "torchrun", "--backends", "native,horovod", "--json", "-")
    outcome = launch([*DOCTOR, *words], check=False)
    cells = json.loads(outcome.stdout)["cells"]
    tried = {(each["launcher"], each["backend"], each["transport"], each["problem"]) for each in cells["tested"]}
    assert tried == {
        ("torchrun", "native", "gloo", ""),
        ("torchrun", "native", "shm", ""),
        ("torchrun", "horovod", "gloo", ""),
    }, str(outcome)
    reasons = {(each["backend"], each["transport"]): each["reason"] for each in cells["skipped"]}
    assert reasons.keys() == {("native", "nccl"), ("horovod", "mpi"), ("horovod", "nccl")}
    assert "torch sees no GPU" in reasons["native", "nccl"]
    assert "not torchrun" in reasons["horovod", "mpi"]
    assert "cell-failed" not in found(outcome)
    assert "native over shm (torchrun): works" in outcome.stderr


def test_run_finds_a_failing_configuration(launch: Launch, mpich: mpi.MPICH) -> None:
    """mpi4py loads MPICH's library, but mpirun is Open MPI's: each rank would be a 1-rank job."""
    env = mpi.of_mpich(launch.directory)
    words = ("--run", "--launchers", "mpirun", "--backends", "mpi", "--json", "-")
    findings = found(launch([*DOCTOR, *words], env=env, check=False))
    assert "mpi over mpi (mpirun) fails" in findings["cell-failed"]["message"]
    assert "but MPI says rank 0 of 1" in findings["cell-failed"]["message"]
    assert "mpirun" in findings["cell-failed"]["fix"]
    assert findings["cell-failed"]["level"] == "error"
    assert "mpi4py-other-mpi" in findings


SHIM = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t which, struct timespec *at) {
    int failed = syscall(SYS_clock_gettime, which, at);
    if (which == CLOCK_REALTIME) at->tv_sec += 90;
    return failed;
}
"""


@pytest.mark.smoke
def test_hosts_are_probed_and_connect_to_each_other(launch: Launch, two_hosts: Hosts) -> None:
    """One name does not resolve; one port is dropped; one clock is 90 s ahead; eth1 leads each host elsewhere."""
    with clock_ahead(launch, two_hosts) as env, dropping(two_hosts, ["sport", "29500"]):
        argv = two_hosts.on(0, *DOCTOR, "--hosts", "hosta:2,hostb:1,nowhere:1", "--json", "-")
        outcome = launch(argv, env=env, check=False)
    findings = found(outcome)
    assert "'nowhere' cannot be reached by ssh: its name does not resolve" in findings["host-unusable"]["message"]
    assert findings["host-unusable"]["level"] == "error"
    assert (
        "host hosta can connect to hostb, but not to its port 29500 (no answer" in findings["port-blocked"]["message"]
    )
    assert "the clock of host hostb is 90." in findings["clock-skew"]["message"]
    assert "s ahead" in findings["clock-skew"]["message"]
    assert f"at {ADDRESSES[1]}, but not at" in findings["networks-not-shared"]["message"]
    hosts = {each["name"]: each for each in json.loads(outcome.stdout)["hosts"]}
    assert hosts["hostb"]["resolved"] == {"hosta": ADDRESSES[0]}
    assert abs(hosts["hosta"]["skew_s"]) < 1
    assert not two_hosts.processes("dualdist.doctor.hosts")


@pytest.mark.parametrize("is_blocked", [False, True])
def test_a_firewall_is_found_and_a_network_with_the_same_address_on_every_host_ignored(
    launch: Launch, two_hosts: Hosts, is_blocked: bool
) -> None:
    """As docker0's, where each host connects to itself. The firewall allows only ssh."""
    try:
        for space in two_hosts.spaces:
            two_hosts.ip(space, "link", "add", "docker0", "type", "veth", "peer", "name", "docker0end")
            two_hosts.ip(space, "addr", "add", "172.17.0.1/16", "dev", "docker0")
            two_hosts.ip(space, "link", "set", "docker0", "up")
        with dropping(two_hosts, []) if is_blocked else nullcontext():
            argv = two_hosts.on(0, *DOCTOR, "--hosts", "hosta,hostb", "--json", "-")
            outcome = launch(argv, env=dict(two_hosts.env), check=False)
    finally:
        for space in two_hosts.spaces:
            two_hosts.ip(space, "link", "del", "docker0")
    findings = found(outcome)
    assert "port-blocked" not in findings, str(outcome)
    assert ("hosts-cut-off" in findings) == is_blocked, str(outcome)
    if is_blocked:
        assert findings["hosts-cut-off"]["level"] == "error"
        message = findings["hosts-cut-off"]["message"]
        assert f"host hosta cannot connect to hostb ({ADDRESSES[1]} port " in message
        assert "firewall" in message
    reached = json.loads(outcome.stdout)["hosts"][0]["connections"]["hostb"]
    assert "172.17.0.1" not in {address for address, _, _ in reached}


@contextmanager
def dropping(two_hosts: Hosts, ports: Sequence[str]) -> Iterator[None]:
    """Drop the second host's packets from these ports, or from all but ssh's, like a firewall."""
    space = two_hosts.spaces[1]
    rules = [
        ["pref", "100", "ipproto", "tcp", "sport", "22", "lookup", "main"],
        ["pref", "101", "ipproto", "tcp", "to", ADDRESSES[0], *ports, "blackhole"],
    ]
    for rule in rules:
        two_hosts.ip(space, "rule", "add", *rule)
    try:
        yield
    finally:
        for rule in rules:
            two_hosts.ip(space, "rule", "del", *rule)


@contextmanager
def clock_ahead(launch: Launch, two_hosts: Hosts) -> Iterator[dict[str, str]]:
    """Yield variables with which ssh reaches an sshd on the second host whose clock is 90 s ahead."""
    compiler = shutil.which("gcc", path=launch.env["PATH"]) or shutil.which("cc", path=launch.env["PATH"])
    if compiler is None:
        lack("gcc", "gcc")
    launch.write("shim.c", SHIM)
    shim = launch.directory / "shim.so"
    launch([compiler, "-shared", "-fPIC", "-o", str(shim), "shim.c"])
    home = Path(two_hosts.env["PATH"].partition(":")[0]).parent
    options = {**SSHD_OPTIONS, "AuthorizedKeysFile": str(home / "authorized"), "PidFile": "none"}
    options |= {"SetEnv": f"LD_PRELOAD={shim}", "Port": "2222"}
    words = ["-D", "-e", "-f", "/dev/null", "-h", str(home / "key"), *(f"-o{n}={to}" for n, to in options.items())]
    sshd = shutil.which("sshd", path=launch.env["PATH"])
    assert sshd is not None
    config = f"Host hostb\n Port 2222\nHost *\n{(home / 'ssh_config').read_text()}"
    launch.write("ssh_config", config)
    ssh = f'#!/bin/sh\nexec {shutil.which("ssh")} -F {launch.directory}/ssh_config "$@"\n'
    env = {**two_hosts.env, **stand_in(launch, "ssh", ssh)}
    with Job(two_hosts.on(1, sshd, *words), env=two_hosts.env, cwd=launch.directory, grace_s=0) as daemon:
        argv = two_hosts.on(0, "ssh", "hostb", "true")
        while launch(argv, env=env, check=False).rc:
            assert daemon.is_running(), daemon.output()
        yield env


# Without site-packages: torch is not needed, and its import takes long.
BARE_DOCTOR = (sys.executable, "-S", "-m", "dualdist", "doctor", "--json")


def batch(slurm: Slurm, launch: Launch, options: tuple[str, ...], *before: str) -> list[dict[str, dict[str, Any]]]:
    """Return the doctor's findings in a batch script, started after each of these words."""
    files = [launch.directory / f"report-{number}.json" for number in range(len(before))]
    lines = [f"{words} {shlex.join([*BARE_DOCTOR, str(file)])}" for words, file in zip(before, files, strict=True)]
    path = launch.write("batch.sh", "\n".join(["#!/bin/sh", *lines, "exit 0", ""]))
    launch([*slurm.sbatch(*options), path], env=slurm.env)
    return [{each["name"]: each for each in json.loads(file.read_text())["findings"]} for file in files]


@pytest.mark.smoke
def test_a_script_and_its_one_task_get_a_fix(slurm: Slurm, launch: Launch) -> None:
    srun = "srun -N1 -n1 --gres=gpu:2 --mpi=none"
    script, task, step = batch(slurm, launch, ("-N2", "-n4", "--gres=gpu:2"), "", srun, "srun -n4 --mpi=none")
    assert "SLURM_NTASKS=4, but this process is not a task" in script["slurm-one-process"]["message"]
    assert "srun -n 4 python script.py" in script["slurm-one-process"]["fix"]
    assert script["slurm-one-process"]["level"] == "warning"
    assert "srun started one task with 2 GPUs (0,1)" in task["slurm-one-task"]["message"]
    assert not {"slurm-one-process", "slurm-one-task"} & step.keys()


def test_an_srun_without_pmix(slurm: Slurm, launch: Launch) -> None:
    """As a Slurm that was built without it: the same plug-ins, except PMIx's."""
    config = launch(["scontrol", "show", "config"], env=slurm.env).stdout
    (line,) = [line for line in config.splitlines() if line.startswith("PluginDir")]
    folder = launch.directory / "plugins"
    folder.mkdir()
    for plugin in Path(line.partition("=")[2].strip()).iterdir():
        if not plugin.name.startswith(("mpi_pmix", "mpi_cray")):
            (folder / plugin.name).symlink_to(plugin)
    own = launch.write("slurm.conf", f"{Path(slurm.env['SLURM_CONF']).read_text()}PluginDir={folder}\n")
    for conf, backend, level in ((own, "native", "info"), (own, "mpi", "error"), (slurm.env["SLURM_CONF"], "mpi", "")):
        env = {**slurm.env, "SLURM_CONF": str(conf), "DUALDIST_BACKEND": backend}
        report = json.loads(launch([*BARE_DOCTOR, "-"], env=env, check=False).stdout)
        found = {each["name"]: each for each in report["findings"]}
        assert found.get("srun-without-pmix", {"level": ""})["level"] == level, report
