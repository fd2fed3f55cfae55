"""One host: shared memory, limits, cores and threads, and GPUs per rank."""

from collections.abc import Iterator

from dualdist.backends.native.limits import SHM_BYTES_PER_RANK, needed_open_files
from dualdist.doctor.checks import DoctorContext, Finding, info, warning
from dualdist.doctor.facts import UNLIMITED, HostFacts
from dualdist.environments import visible_devices
from dualdist.environments.env_values import INTEGER, get_value
from dualdist.launch.env_defaults import threads_per_rank as default_threads
from dualdist.utils.variables import THREADS

MIB = 2**20
# InfiniBand's libraries lock a few hundred MiB; sites that use it usually set no limit.
MIN_LOCKED_BYTES = 1 << 30
# These set OMP_NUM_THREADS.
SETS_THREADS = ("torchrun", "spawn")
# Launchers that can restrict each task to its own GPUs; ranks of the others inherit what shows GPUs to a process.
RESTRICTS_GPUS = ("srun", "jsrun", "flux", "mpiexec")


def find(context: DoctorContext) -> Iterator[Finding]:
    yield from _check_gpus(context)
    size = context.local_ranks if context.topology is None else max(context.local_ranks, context.topology.size)
    yield from check_limits(context.facts.host, context.local_ranks, size)
    yield from _check_threads(context)


def check_limits(host: HostFacts, local_ranks: int, size: int) -> Iterator[Finding]:
    """Yield limits that are too low for `local_ranks` ranks of a job of `size`; used for remote hosts, too."""
    required = local_ranks * SHM_BYTES_PER_RANK
    if host.shm_free is None or host.shm_free < required:
        state = "does not exist" if host.shm_free is None else f"has {host.shm_free / MIB:.0f} MiB free"
        yield warning(
            "shm-too-small",
            f"/dev/shm {state}, but {local_ranks} ranks need at least {required / MIB:.0f} MiB",
            "ranks of one host fall back to Gloo, which is slower, and DataLoader workers may die with a bus error",
            "in a container: docker run --shm-size=1g, or --ipc=host; else mount -o remount,size=50% /dev/shm as root",
        )
    hard, needed = host.open_files[1], needed_open_files(size)
    if hard != UNLIMITED and hard < needed:
        yield warning(
            "too-few-files",
            f"a process may open at most {hard} files (ulimit -Hn), but a rank of {size} may need {needed}",
            "every pair of ranks has connections, and DataLoader workers need files, too: `Too many open files`",
            "/etc/security/limits.conf: * hard nofile 65536, then log in again; in docker: --ulimit nofile=65536",
        )
    soft, devices = host.locked_memory[0], ", ".join(host.infiniband)
    if host.infiniband and soft != UNLIMITED and soft < MIN_LOCKED_BYTES:
        yield warning(
            "locked-memory",
            f"a process may lock at most {soft / MIB:.3g} MiB (ulimit -l), and this host has {devices}",
            "InfiniBand buffers must be locked: NCCL and MPI fail (`Cannot allocate memory`) or fall back to TCP",
            "ulimit -l unlimited, permanently in /etc/security/limits.conf (* - memlock unlimited); with Slurm also "
            "PropagateResourceLimitsExcept=MEMLOCK; with docker --ulimit memlock=-1",
        )


def _check_threads(context: DoctorContext) -> Iterator[Finding]:
    host, ranks = context.facts.host, context.local_ranks
    # Bound ranks have their own cores; the others share them.
    is_bound = host.cores < host.total_cores and context.is_distributed
    sharing = 1 if is_bound else ranks
    usable = min(host.cores, host.cpu_quota or host.cores)
    # OMP_NUM_THREADS may be a list for nested regions.
    value = (get_value(context.environ, THREADS) or "").partition(",")[0].strip()
    configured = threads = int(value) if INTEGER.fullmatch(value) and int(value) else None
    if threads is None and context.is_distributed and ranks > 1 and context.launcher not in SETS_THREADS:
        threads = host.cores
    fair = default_threads(usable, sharing)
    if threads is not None and sharing * threads > usable and threads > fair:
        setting = f"{THREADS}={threads}" if configured else f"{THREADS} is not set"
        yield warning(
            "thread-oversubscription",
            f"{setting}: {sharing} rank(s) with {threads} threads each share {usable} core(s)",
            "threads that compete for cores make a step several times slower",
            f"export {THREADS}={fair}; dualdist run and exec set it if it is unset",
        )
    if context.is_distributed and sharing > usable:
        yield warning(
            "more-ranks-than-cores",
            f"{sharing} ranks on this host share {usable} core(s)",
            "ranks wait for each other at every step",
            f"start {usable} rank(s) on this host, or request more cores",
        )
    if host.cpu_quota is not None and host.cpu_quota < host.cores and configured is None:
        yield warning(
            "cpu-quota",
            f"this container's quota is {host.cpu_quota} core(s), but torch sees {host.cores}",
            "torch starts a thread per visible core, and the kernel throttles them all",
            f"export {THREADS}={fair}, or docker run --cpuset-cpus instead of --cpus",
        )


def _check_gpus(context: DoctorContext) -> Iterator[Finding]:
    visible, listed = visible_devices.describe(context.environ), context.facts.host.gpus
    gpus, ranks = context.visible_gpus, context.local_ranks
    if listed and visible_devices.hides_all(context.environ):
        message, fix = f"{visible} hides all {listed} GPU(s) of this host", "unset it to use them"
        yield info("gpus-hidden", message, "everything runs on the CPU", fix)
    if not gpus or ranks <= 1 or not (context.is_distributed or context.is_planned):
        return
    # The driver also lists GPUs that a task may not use: with fewer than ranks, no rank has one for itself.
    if gpus == 1 and context.launcher in RESTRICTS_GPUS and not 0 < listed < ranks:
        yield info(
            "gpus-hidden-per-task",
            f"{ranks} ranks are on this host, and this rank sees one GPU" + (f" ({visible})" if visible else ""),
            "each task has its own GPU, with index 0 in every task: torch.device('cuda', local_rank) would fail",
            "use dd.device(); where NCCL is slow within a host, let every task see all GPUs (--gpus-per-node "
            "without --gpus-per-task), since NCCL cannot copy between GPUs that it does not see",
        )
    elif ranks > gpus:
        yield Finding(
            "error" if context.is_distributed else "warning",
            "more-ranks-than-gpus",
            f"{ranks} ranks on this host, but torch sees {gpus} GPU(s)",
            "NCCL refuses two ranks on one GPU (`Duplicate GPU detected`)",
            f"start {gpus} rank(s) on this host, or hide the GPUs to train on the CPU: {visible_devices.CUDA}=",
        )
