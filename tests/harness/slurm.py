"""Slurm cluster on this machine: two nodes, an authentication daemon and a controller, on loopback only.

Nothing outside its directory is used or changed, and no daemon outlives the process that started it.
"""

import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness.jobs import Job

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "squeue", "scancel", "sinfo")
# libpmix-dev, since Slurm's plug-in opens the library by a name that only the development package has.
PACKAGES = "slurmctld slurmd slurm-client munge libpmix-dev"
SBATCH = Path(__file__).with_name("sbatch.py")
NODES = ("n1", "n2")
CPUS = 4
"""Cores that each node claims to have: 2+2 and 3+1 tasks fit without --overcommit."""
START_S = 30.0
POLL_S = 0.05
PORT_TRIES = 3

SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge/socket,cred_expire={credential_s}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
KillWait=2
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
NODE_CONF = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=4096 Gres=gpu:2 "
    "State=UNKNOWN"
)
# Fences without data take Slurm's tree by default, which in Slurm 22.05 waits for nobody where TreeWidth is more than
# the job's nodes: a rank leaves MPI_Init first, and its first message makes Open MPI crash in another's MPI_Init.
MPI_CONF = "PMIxCliTmpDirBase={sockets}\nPMIxCollFence=ring\n"
# Any two devices stand for GPUs: Slurm assigns them by number, and no program opens them.
GRES_CONF = "Name=gpu File={directory}/gpu[0-1]\n"


class ClusterError(Exception):
    """Raised if the cluster does not start; the message has its daemons' output."""


@dataclass(frozen=True)
class Slurm:
    """A running cluster; `env` is what its programs need in addition to the base environment."""

    env: Mapping[str, str] = field(repr=False)
    directory: Path

    def srun(self, *options: str, mpi: str = "none") -> list[str]:
        """Return the argv to which the program is appended: srun("-N2", "-n4", mpi="pmix")."""
        return ["srun", f"--mpi={mpi}", *options]

    def salloc(self, *options: str) -> list[str]:
        return ["salloc", "--quiet", *options]

    def sbatch(self, *options: str) -> list[str]:
        """Return the argv to which a script's path is appended; it exits with the script's exit code."""
        return [sys.executable, str(SBATCH), *options]

    def queue(self) -> list[str]:
        """Return a line per job that has not ended."""
        return self._query("squeue", "--noheader", "--format=%i %T %j").splitlines()

    def cancel_all(self) -> list[str]:
        """Cancel and return all jobs; the queue is empty afterwards."""
        if not eventually(lambda: not self.queue(), within_s=5):
            left = self.queue()
            self._query("scancel", "--full", "--signal=KILL", *[line.split()[0] for line in left])
            self._query("scancel", *[line.split()[0] for line in left])
            assert eventually(lambda: not self.queue(), within_s=20), f"cannot cancel {self.queue()}"
            return left
        return []

    def is_ready(self) -> bool:
        """Return True if both nodes are idle."""
        return self._query("sinfo", "--noheader", "--Node", "--format=%T").split() == ["idle"] * len(NODES)

    def _query(self, *argv: str) -> str:
        """Return a client's output, "" if the controller is unreachable."""
        done = subprocess.run(argv, env=dict(self.env), capture_output=True, text=True, timeout=START_S, check=False)
        return done.stdout


def missing(path: str) -> list[str]:
    """Return the programs of Slurm and munge that are not on `path`."""
    return [program for program in PROGRAMS if shutil.which(program, path=path) is None]


@contextmanager
def cluster(directory: Path, base_env: Mapping[str, str], *, credential_s: int = 120) -> Iterator[Slurm]:
    """Yield a running cluster, and stop it after the block.

    A requeued job waits until its credential has expired, after `credential_s`.
    """
    for attempt in range(1, PORT_TRIES + 1):
        with ExitStack() as daemons:
            home = directory / f"try-{attempt}"
            home.mkdir()
            try:
                slurm = _start(home, base_env, daemons, credential_s)
            except ClusterError:  # another program may have taken a free port since
                if attempt == PORT_TRIES:
                    raise
                continue
            yield slurm
            return


def _start(home: Path, base_env: Mapping[str, str], daemons: ExitStack, credential_s: int) -> Slurm:
    munge = home / "munge"
    munge.mkdir(mode=0o700)
    for name in ("state", "conf", *(f"spool-{node}" for node in NODES)):
        (home / name).mkdir()
    confs = _write_confs(home, credential_s)
    env = {**base_env, "SLURM_CONF": str(home / "conf" / "slurm.conf"), **_open_mpi_on_one_host()}
    slurm = Slurm(env, home)
    jobs: dict[str, Job] = {}

    def daemon(name: str, *argv: str, conf: Path | None = None) -> None:
        own = env | ({"SLURM_CONF": str(conf)} if conf else {})
        jobs[name] = daemons.enter_context(Job(argv, env=own, cwd=home, grace_s=0))

    def wait_for(what: str, ready: Callable[[], bool]) -> None:
        eventually(lambda: ready() or not all(job.is_running() for job in jobs.values()), within_s=START_S)
        if not ready():
            raise ClusterError(f"no {what} in {home}\n" + "\n".join(f"{n}: {j.output()}" for n, j in jobs.items()))

    (munge / "key").write_bytes(os.urandom(128))
    (munge / "key").chmod(0o600)
    files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
    daemon("munged", "munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *files)
    wait_for("munge socket", (munge / "socket").exists)
    daemon("slurmctld", "slurmctld", "-D", "-i")
    for node, conf in confs.items():
        daemon(f"slurmd {node}", "slurmd", "-D", "-N", node, conf=conf)
    wait_for("two idle nodes", slurm.is_ready)
    return slurm


def _write_confs(home: Path, credential_s: int) -> dict[str, Path]:
    """Write each node's slurm.conf, all alike, and an mpi.conf: sockets of the node's own, and fences that wait."""
    host = socket.gethostname().split(".")[0]
    controller, *ports = _free_ports(1 + len(NODES))
    node_lines = [NODE_CONF.format(name=n, host=host, port=p, cpus=CPUS) for n, p in zip(NODES, ports, strict=True)]
    text = SLURM_CONF.format(
        host=host,
        port=controller,
        user=pwd.getpwuid(os.getuid()).pw_name,
        directory=home,
        credential_s=credential_s,
        nodes="\n".join(node_lines),
    )
    (home / "conf" / "slurm.conf").write_text(text)
    for number in range(2):
        (home / f"gpu{number}").symlink_to("/dev/null")
    gpus = GRES_CONF.format(directory=home)
    (home / "conf" / "gres.conf").write_text(gpus)
    confs = {}
    for node in NODES:
        sockets = home / f"pmix-{node}"
        sockets.mkdir()
        confs[node] = home / "conf" / node / "slurm.conf"
        confs[node].parent.mkdir()
        confs[node].write_text(text)
        confs[node].with_name("gres.conf").write_text(gpus)
        confs[node].with_name("mpi.conf").write_text(MPI_CONF.format(sockets=sockets))
    return confs


def _open_mpi_on_one_host() -> dict[str, str]:
    """Return settings for MPI ranks of two nodes that share a host and its few cores.

    In shared memory the ranks of both nodes would use the same names and crash, so they use loopback. As the nodes
    claim more cores than there are, waiting ranks must yield.
    """
    return {"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_btl_tcp_if_include": "lo", "OMPI_MCA_mpi_yield_when_idle": "1"}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def eventually(holds: Callable[[], bool], *, within_s: float) -> bool:
    """Poll until holds() is True; return False at the timeout. Slurm has no event to wait for."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
