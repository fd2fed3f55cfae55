"""One host: its shared memory, limits, cores and threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dualdist.doctor.context import DoctorContext
from dualdist.doctor.facts import UNLIMITED, HostFacts
from dualdist.doctor.findings import Finding
from dualdist.environments.env_values import INTEGER, get_value
from dualdist.launch.env_defaults import THREADS
from dualdist.launch.env_defaults import threads_per_rank as threads_of
from dualdist.utils.resource_limits import SHM_BYTES_PER_RANK, needed_open_files

MIB = 2**20
# What InfiniBand's libraries lock at the least is a few hundred MiB; sites that know it set no limit.
LOCKED_BYTES = 1 << 30
SETS_THREADS = ("torchrun", "spawn")  # torchrun sets one; dd.spawn's ranks are children of a program that may


def find(case: DoctorContext) -> Iterator[Finding]:
    """What is wrong with this host for the ranks on it."""
    size = case.ranks if case.topology is None else max(case.ranks, case.topology.size)
    yield from of_limits(case.facts.host, case.ranks, size)
    yield from _of_threads(case)


def of_limits(host: HostFacts, ranks: int, size: int) -> Iterator[Finding]:
    """What is too small on a host for so many of a job's ranks; also for hosts that are asked by ssh."""
    wanted = ranks * SHM_BYTES_PER_RANK
    if host.shm_free is None or host.shm_free < wanted:
        seen = "is not there" if host.shm_free is None else f"has {host.shm_free / MIB:.0f} MiB free"
        yield Finding(
            "shm-too-small",
            "warning",
            f"/dev/shm {seen}, which should be {wanted / MIB:.0f} MiB or more for {ranks} ranks",
            "ranks of one host go over Gloo then, which is slower, and a DataLoader's workers may die by a bus error",
            "in a container: docker run --shm-size=1g, or --ipc=host; else mount -o remount,size=50% /dev/shm as root",
        )
    hard = host.files[1]
    if hard != UNLIMITED and hard < needed_open_files(size):
        yield Finding(
            "too-few-files",
            "warning",
            f"a process may open {hard} files at most (ulimit -Hn), "
            f"and a rank of {size} may need {needed_open_files(size)}",
            "every pair of ranks has connections, and a DataLoader's workers take files, too: `Too many open files`",
            "raise it in /etc/security/limits.conf (* hard nofile 65536) or with --ulimit nofile=65536 of docker, "
            "and log in anew",
        )
    if host.infiniband and host.locked[0] != UNLIMITED and host.locked[0] < LOCKED_BYTES:
        yield Finding(
            "locked-memory",
            "warning",
            f"a process may lock {host.locked[0] / MIB:.3g} MiB of memory (ulimit -l), and this host has "
            f"{', '.join(host.infiniband)}",
            "InfiniBand wants its buffers locked: NCCL and MPI fail (`Cannot allocate memory`), or go over TCP",
            "ulimit -l unlimited, for good in /etc/security/limits.conf (* - memlock unlimited); with Slurm also "
            "PropagateResourceLimitsExcept=MEMLOCK; with docker --ulimit memlock=-1",
        )


def _of_threads(case: DoctorContext) -> Iterator[Finding]:
    host, ranks = case.facts.host, case.ranks
    is_bound = host.cores < host.all_cores and case.is_started
    # Ranks that are bound have cores of their own; the others share them.
    shares = 1 if is_bound else ranks
    usable = min(host.cores, host.quota or host.cores)
    threads = threads_set(case.environ)
    if threads is None and case.is_started and ranks > 1 and case.launcher not in SETS_THREADS:
        threads = host.cores
    fair = threads_of(usable, shares)
    if threads is not None and shares * threads > usable and threads > fair:
        said = f"{THREADS}={threads}" if threads_set(case.environ) else f"{THREADS} is not set"
        yield Finding(
            "thread-oversubscription",
            "warning",
            f"{said}: {shares} rank(s) of {threads} threads share {usable} core(s)",
            "threads that wait for each other's cores make a step several times slower",
            f"export {THREADS}={fair}; dualdist run sets it where nobody has",
        )
    if case.is_started and shares > usable:
        yield Finding(
            "more-ranks-than-cores",
            "warning",
            f"{shares} ranks of this host share {usable} core(s)",
            "ranks wait for each other at every step",
            f"start {usable} on this host, or give the job more cores",
        )
    if host.quota is not None and host.quota < host.cores and threads_set(case.environ) is None:
        yield Finding(
            "cpu-quota",
            "warning",
            f"this container may use {host.quota} core(s) at a time, and torch sees {host.cores}",
            "torch starts a thread for each that it sees, and the kernel stops all of them in turn",
            f"export {THREADS}={fair}, or docker run --cpuset-cpus instead of --cpus",
        )


def threads_set(environ: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS; OpenMP takes a list for nested regions, of which the first number counts."""
    value = (get_value(environ, THREADS) or "").partition(",")[0].strip()
    return int(value) if INTEGER.fullmatch(value) and int(value) else None
