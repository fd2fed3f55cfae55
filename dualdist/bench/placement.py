"""The placement of a benchmark's ranks: on this host, on hosts of -H, or on those of a Slurm or PBS allocation.

    python -m dualdist.bench.placement FILE [--gpus]

prints a host's cores and GPUs, and whether it sees a file, as JSON: it is run on each host before anything is measured.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dualdist.errors import LaunchError, UsageError
from dualdist.launch import ssh
from dualdist.launch.allocation import allocated_hosts, node_cores, spread
from dualdist.launch.env_defaults import allocated_tasks, rank_variables
from dualdist.launch.execute import run_command
from dualdist.launch.hosts import is_local_host, parse_hosts, read_hostfile
from dualdist.launch.job import Command, Host, Job, Site, slots_error
from dualdist.launch.launchers.srun import PROGRAM as SRUN
from dualdist.utils import accelerator
from dualdist.utils.deadline import Deadline
from dualdist.utils.machine import usable_cores
from dualdist.utils.package_probe import TORCH_S

DEFAULT_RANKS = 2
PROBE = ("-m", "dualdist.bench.placement")
WITH_GPUS = "--gpus"
NODE_NAME, TASK_GPUS = "SLURMD_NODENAME", "SLURM_GPUS_PER_TASK"


@dataclass(frozen=True)
class HostProbe:
    """The cores and GPUs that a host offers its ranks; `host` is Slurm's name of it."""

    host: str
    cores: int
    gpus: int
    sees_file: bool


@dataclass(frozen=True)
class Placement:
    """The hosts of the ranks, each with as many slots as it gets ranks; none for this host alone.

    `interface` is the network interface of --network-interface. `is_slurm`: srun starts processes on these hosts.
    `gpus` and `cores` are those of each host, once probe_hosts() has asked.
    """

    hosts: tuple[Host, ...] = ()
    interface: str | None = None
    is_slurm: bool = False
    gpus: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()

    def __str__(self) -> str:
        return ",".join(map(str, self.hosts))

    @property
    def usable_gpus(self) -> int:
        """The GPUs that ranks may use, of each host as many as it has ranks at most."""
        return sum(min(gpus, host.slots) for gpus, host in zip(self.gpus, self.hosts, strict=True))

    @property
    def threads(self) -> int:
        """The threads of each rank, so that the ranks of a host share its cores."""
        return max(1, min(cores // host.slots for cores, host in zip(self.cores, self.hosts, strict=True)))

    def describe_gpus(self) -> str:
        return ", ".join(f"{gpus} on {host.name}" for gpus, host in zip(self.gpus, self.hosts, strict=True))


HERE = Placement()


def find_placement(
    hosts: str | None, hostfile: str | None, interface: str | None, ranks: int | None, environ: Mapping[str, str]
) -> tuple[Placement, int]:
    """Return where the ranks run, and how many they are: of -H or --hostfile, else of this allocation, else here."""
    if hosts is not None and hostfile is not None:
        raise UsageError("-H and --hostfile both say where to run: give one of them")
    is_slurm = allocated_tasks(environ) is not None
    if hosts is not None or hostfile is not None:
        found = parse_hosts(hosts) if hosts is not None else read_hostfile(Path(str(hostfile)))
        ranks = ranks or sum(host.slots for host in found)
        is_elsewhere = not all(is_local_host(host.name) for host in found)
    else:
        found = allocated_hosts(environ)
        ranks = ranks or max(DEFAULT_RANKS, sum(host.slots for host in found))
        is_elsewhere = len(found) > 1
        found = spread(found, ranks) if is_elsewhere else ()
    if error := slots_error(ranks, found):
        raise UsageError(error)
    if not is_elsewhere:
        return Placement(interface=interface), ranks
    taken = Job(("-",), ranks, hosts=found).ranks_by_host()
    return Placement(tuple(Host(host.name, count) for host, count in taken), interface, is_slurm), ranks


def probe_hosts(
    placement: Placement, site: Site, environ: Mapping[str, str], folder: Path, *, has_gpus: bool
) -> Placement:
    """Return the placement with each host's GPUs and cores; LaunchError if a host does not see files of the folder.

    GPUs are counted if `has_gpus`, as that imports torch on each host.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".dualdist-hosts-") as shared:
        words = (*PROBE, shared.name, *([WITH_GPUS] if has_gpus else []))
        if placement.is_slurm:
            found = _probe_by_srun(placement, site, words)
        else:
            found = _probe_by_ssh(placement, site, words, environ)
    for host in placement.hosts:
        if not found[host.name].sees_file:
            raise LaunchError(
                f"host {host.name!r} does not see {folder}, where the ranks leave their reports: start this in "
                "a folder that all hosts share, or name one by --output of dualdist compare"
            )
    facts = [found[host.name] for host in placement.hosts]
    gpus, cores = [each.gpus for each in facts], [each.cores for each in facts]
    if placement.is_slurm:  # a task has its own cores, and perhaps its own GPUs
        by_name = node_cores(environ)
        cores = [by_name.get(host.name, own) for host, own in zip(placement.hosts, cores, strict=True)]
        if environ.get(TASK_GPUS):
            gpus = [own * host.slots for host, own in zip(placement.hosts, gpus, strict=True)]
    return replace(placement, gpus=tuple(gpus), cores=tuple(cores))


def _probe_by_ssh(
    placement: Placement, site: Site, words: tuple[str, ...], environ: Mapping[str, str]
) -> dict[str, HostProbe]:
    env = rank_variables(environ, {}, threads=None, interface=None, has_hosts=True)
    with ExitStack() as stack:
        peers = []
        for host in placement.hosts:
            is_here = is_local_host(host.name)
            argv = [site.python, *words] if is_here else ssh.remote_python_argv(host.name, site, env, words)
            peers.append(stack.enter_context(ssh.start_peer(host.name, argv, site)))
        deadline = Deadline(TORCH_S)
        return {peer.name: _read_facts(peer.name, peer.exchange("answer its probe", deadline)) for peer in peers}


def _probe_by_srun(placement: Placement, site: Site, words: tuple[str, ...]) -> dict[str, HostProbe]:
    count, names = len(placement.hosts), ",".join(host.name for host in placement.hosts)
    flags = (f"--nodelist={names}", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1")
    command = Command((site.path_of(SRUN), *flags, site.python, *words))
    code, output = run_command(command, timeout_s=TORCH_S, what=f"the probe of {names}")
    replies = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    found = {reply.get("host", ""): _read_facts(names, reply) for reply in replies}
    if code or found.keys() != {host.name for host in placement.hosts}:
        raise LaunchError(f"the probe of {names} by srun failed (exit code {code}):\n{output.strip()}")
    return found


def _read_facts(name: str, reply: dict[str, Any]) -> HostProbe:
    try:
        return HostProbe(**reply)
    except TypeError as error:
        raise LaunchError(
            f"{name!r} answered {reply}, which is not this dualdist's format: install the same"
        ) from error


def main(file: str, *, has_gpus: bool) -> None:
    gpus = accelerator.count() if has_gpus else 0
    facts = HostProbe(os.environ.get(NODE_NAME, ""), usable_cores(), gpus, os.path.exists(file))
    print(json.dumps(asdict(facts)))


if __name__ == "__main__":
    main(sys.argv[1], has_gpus=WITH_GPUS in sys.argv)
