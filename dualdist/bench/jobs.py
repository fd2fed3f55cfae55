"""Jobs of a benchmark: models and methods, options, where jobs run, their command lines, and their ranks' reports.

Five terms are used throughout. A method is a way to reduce gradients, such as dualdist or DDP. A contender is what is
timed against others: a method, in `dualdist compare` on its own configuration (backend, transport and launcher).
A baseline is a contender without dualdist, or on one rank; a candidate is a contender that may be the fastest.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dualdist.backends import registry
from dualdist.backends.registry import Availability
from dualdist.bench.placement import HERE, Placement
from dualdist.bench.slow_link import LAUNCHER, wrap_in_slow_link
from dualdist.bench.statistics import foreign_cores
from dualdist.environments.visible_devices import HIDDEN
from dualdist.errors import DualdistError, LaunchError, UsageError
from dualdist.launch.env_defaults import SLURM_JOB, default_launcher, interface_variables
from dualdist.launch.execute import run_command
from dualdist.launch.failure import find_exception
from dualdist.launch.job import Command, Job, Site
from dualdist.launch.launchers import DEFAULT_LAUNCHER, LAUNCHERS, build_command, check_launcher, find_conflicts
from dualdist.launch.launchers.srun import SRUN
from dualdist.utils.machine import read_cpu
from dualdist.utils.redaction import make_redactor, redact_command, redact_variables
from dualdist.utils.suggest import require_choice

SPAWN = "spawn"
OUTPUT_LINES = 30  # how many lines of a failed job's output its error shows
Report = dict[str, Any]  # what one rank, or rank 0 for all ranks, has written
FOREIGN = "foreign_cores_of_job"  # the entry of every report that holds other processes' CPU use during the job
# Image size of the ResNets. At 64 a step of ResNet-18 takes about as long as two ranks on two cores need to exchange
# its gradients, where overlap matters most; at 32 communication dominates.
IMAGE_SIZE = 64


@dataclass(frozen=True)
class BenchmarkModel:
    """A model to train; `batch` is per rank, `steps` per launch of a comparison."""

    description: str
    batch: int = 8
    steps: int = 20


MODELS = {
    "resnet18": BenchmarkModel("ResNet-18 of torchvision, 11.7 million parameters in 62 tensors", steps=15),
    "mlp": BenchmarkModel(
        "100 residual linear layers 64 wide, 0.4 million parameters in 200 tensors", batch=32, steps=100
    ),
    "transformer": BenchmarkModel(
        "5 encoder layers 384 wide on 32 tokens, 9.6 million parameters in 63 tensors", batch=4
    ),
    "resnet50": BenchmarkModel("ResNet-50 of torchvision, 25.6 million parameters in 161 tensors", steps=8),
    "transformer100m": BenchmarkModel(
        "16 encoder layers 768 wide on 128 tokens, 126 million parameters", batch=8, steps=5
    ),
}
DEFAULT_MODELS = ("resnet18", "mlp", "transformer")  # what `dualdist bench step` trains by default
DUALDIST, SHARDED_DUALDIST = "dualdist", "dualdist_shard"
# The methods by name, in the order of the first round.
METHODS = {
    "none": "no communication",
    "ddp": "DDP",
    "ddp_view": "DDP, gradient_as_bucket_view",
    "ddp_best": "DDP, bucket views, buffers not broadcast",
    "ddp_dualdist": 'DDP over the process group "dualdist"',
    DUALDIST: DUALDIST,
    SHARDED_DUALDIST: "dualdist, shard=True",
    "zero": "DDP, ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2",
    "fsdp2_dualdist": 'FSDP2 over the process group "dualdist"',
    "hvd": "raw Horovod",
    "naive": "an allreduce per parameter",
}
# Compressions are methods too, named by the texts that wrap_optimizer() takes.
COMPRESSED = re.compile(r"fp16|bf16|powersgd:[1-9][0-9]*|topk:[0-9]*\.[0-9]+")
BASELINES = {name: METHODS[name] for name in ("ddp", "ddp_view", "hvd", "none")} | {"one": "one rank"}
DEFAULT_BASELINES = ("ddp", "hvd", "none", "one")  # what `dualdist compare` runs by default
# The methods that reduce gradients by torch's process groups.
TORCH_METHODS = ("ddp", "ddp_view", "ddp_best", "ddp_dualdist", "zero", "fsdp2", "fsdp2_dualdist", "naive")
OPTIMIZERS = ("sgd", "adamw")
# Calls of dualdist that move a model's state, each with the call of torch that it is compared with.
STATE_CALLS = {
    "broadcast_parameters": "DDP(model)",
    "save_checkpoint": "torch.save",
    "load_checkpoint": "torch.load",  # called with mmap=True; load_state_dict() follows
}
DTYPES = ("float32", "bfloat16", "float16")  # the dtypes whose allreduce can be timed


def check_method(name: str) -> str:
    """Return the name if it is of METHODS, or a compression; else UsageError."""
    if not COMPRESSED.fullmatch(name):
        require_choice(name, METHODS, "contender", ", fp16, bf16, powersgd:RANK or topk:RATIO")
    return name


@dataclass(frozen=True)
class StepOptions:
    """Options of a step measurement: `steps` per sample, 0 for as many as fill `block_s` seconds."""

    model: str
    contenders: tuple[str, ...]  # methods
    rounds: int = 15
    steps: int = 0
    block_s: float = 0.4
    warmup: int = 3
    batch: int = 0  # per rank; 0 for the model's default
    image_size: int = IMAGE_SIZE
    device: str = "auto"
    timeout_s: float = 300.0
    seed: int = 0
    optimizer: str = OPTIMIZERS[0]

    @property
    def batch_size(self) -> int:
        return self.batch or MODELS[self.model].batch


@dataclass(frozen=True)
class TrainOptions:
    """Training options of a launch of `dualdist compare`, equal for all so that all train the same model.

    `batch` is the global batch size. `slowdown` stretches every step, to check that a comparison detects it.
    Afterwards allreduces of `sizes` bytes are timed.
    """

    model: str
    method: str
    batch: int
    warmup: int
    steps: int
    image_size: int = IMAGE_SIZE
    slowdown: float = 1.0
    sizes: tuple[int, ...] = ()
    device: str = "auto"
    timeout_s: float = 300.0
    seed: int = 0


@dataclass(frozen=True)
class AllreduceOptions:
    """Options of an allreduce sweep: sizes in bytes, each repeated to fill `block_s` seconds, of each dtype."""

    sizes: tuple[int, ...]
    rounds: int = 15
    block_s: float = 0.03
    device: str = "auto"
    timeout_s: float = 300.0
    dtypes: tuple[str, ...] = DTYPES[:1]


@dataclass(frozen=True)
class StateOptions:
    """Options of a measurement of large states: a model of about `nbytes` bytes of parameters."""

    nbytes: int
    rounds: int = 5
    device: str = "auto"
    timeout_s: float = 300.0


@dataclass(frozen=True)
class RunConfig:
    """Backend, transport (None for the backend's default) and launcher of a job."""

    backend: str
    transport: str | None
    launcher: str

    def __str__(self) -> str:
        return self.describe()

    def describe(self, remark: str = "") -> str:
        """Return "native over shm (torchrun)", with a remark on the launch: "(torchrun, again)"."""
        over = f" over {self.transport}" if self.transport not in (None, self.backend) else ""
        return f"{self.backend}{over} ({self.launcher}{remark})"


def parse_configs(text: str, launcher: str | None, default: str = DEFAULT_LAUNCHER) -> list[RunConfig]:
    """Parse `native,horovod:mpi`, with the launcher of all, or None for mpirun or the default, as each needs."""
    if launcher is not None:
        require_choice(launcher, LAUNCHERS, "launcher")
    found = []
    for word in text.split(","):
        backend, colon, transport = word.strip().partition(":")
        require_choice(backend, registry.names(), "backend", ", or several with commas between, as native,horovod:mpi")
        if colon:
            require_choice(transport, registry.transports(), "transport")
        fitting = "mpirun" if registry.needs_mpi(backend, transport) else default
        found.append(RunConfig(backend, transport or None, launcher or fitting))
    if len(set(found)) < len(found):
        raise UsageError(f"backends {text!r}: name each once")
    return found


def split_words(text: str | None) -> list[str]:
    """Return the words between commas."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def expand_configs(
    launchers: Sequence[str], backends: Sequence[str], transports: Sequence[str], environ: Mapping[str, str]
) -> list[RunConfig]:
    """Return every combination; of no names all transports, and the default launcher of each."""
    for backend in backends:
        require_choice(backend, registry.names(), "backend")
    for transport in transports:
        require_choice(transport, registry.transports(), "transport")
    found = [
        RunConfig(backend, transport, check_launcher(launcher))
        for backend in backends
        for transport in transports or registry.get(backend).transports
        for launcher in launchers or (default_launcher(environ, backend, transport)[0],)
    ]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class MeasurementSettings:
    """Settings shared by the jobs of a benchmark; `env` is set for every rank, `timeout_s` limits a whole job."""

    ranks: int
    site: Site
    threads: int = 1
    device: str = "auto"
    timeout_s: float = 1800.0
    env: Mapping[str, str] = field(default_factory=dict)
    slow_link: str = ""  # the rate of a link that bench/slow_link.py makes, "" for none
    placement: Placement = HERE

    def __post_init__(self) -> None:
        for name in ("ranks", "threads"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: expected 1 or more")
        if self.timeout_s <= 0:
            raise UsageError(f"timeout {self.timeout_s:g}: expected seconds above 0")


def parse_env(assignments: Sequence[str]) -> dict[str, str]:
    """Parse the variables of --env."""
    found = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise UsageError(f"--env {assignment}: expected NAME=VALUE")
        found[name] = value
    return found


@dataclass(frozen=True)
class MachineFacts:
    """Properties of this machine that decide which configurations can run, besides its launchers."""

    gpus: int  # how many the ranks may use, on all their hosts: none with --device cpu
    backends: Mapping[str, Availability]
    is_in_slurm: bool
    is_script: bool = False


def refusal_reasons(
    configs: Sequence[RunConfig], settings: MeasurementSettings, facts: MachineFacts
) -> dict[RunConfig, str]:
    """Return the first reason of each configuration that cannot run here."""
    found = {}
    for config in configs:
        reason = next(_reasons(config, settings, facts), None)
        if reason is not None:
            found[config] = reason
    return found


def _reasons(config: RunConfig, settings: MeasurementSettings, facts: MachineFacts) -> Iterator[str]:
    hosts = settings.placement.hosts
    # Launcher-independent reasons first.
    for launcher in (None, config.launcher):
        options: Any = {"ranks": settings.ranks, "horovod_has_mpi": facts.backends["horovod"].mpi}
        options["has_hosts"] = bool(hosts)
        yield from (message for _, message in find_conflicts(launcher, config.backend, config.transport, **options))
    if settings.slow_link and (config.launcher != LAUNCHER or (config.transport == "shm" and settings.ranks < 3)):
        yield f"with --slow-link ranks are on two hosts (shm needs two ranks on one), and started by {LAUNCHER}"
    if hosts and config.transport == "shm" and all(host.slots == 1 for host in hosts):
        yield "shm needs two ranks on one host, and each of these gets one"
    installed = facts.backends[config.backend]
    if not installed.available:
        yield installed.reason
    yield from _launcher_reasons(config, settings, facts)
    if config.transport == "nccl":
        yield from _nccl_reasons(config, settings, facts)
    if config.transport == "gloo" and installed.gloo is False:
        yield "the installed Horovod was built without Gloo"


def _launcher_reasons(config: RunConfig, settings: MeasurementSettings, facts: MachineFacts) -> Iterator[str]:
    if facts.is_script and config.launcher == SPAWN and not settings.placement.hosts:
        yield "a script does not spawn its ranks: choose another launcher"
    try:
        for program in LAUNCHERS[config.launcher].programs:
            settings.site.path_of(program)
        program_command(config, ("-c", "pass"), settings)
    except DualdistError as error:
        yield str(error)
    if config.launcher == "srun" and not facts.is_in_slurm:
        yield f"this is no Slurm allocation ({SLURM_JOB} is not set): start it in one"


def _nccl_reasons(config: RunConfig, settings: MeasurementSettings, facts: MachineFacts) -> Iterator[str]:
    if not facts.gpus:
        yield "nccl needs GPU tensors, and torch sees no GPU here, or may not use one (--device cpu)"
    elif facts.gpus < settings.ranks:
        where = f" ({settings.placement.describe_gpus()})" if settings.placement.hosts else ""
        yield f"nccl needs a GPU per rank: torch sees {facts.gpus}{where}, and there are {settings.ranks} ranks"
    if registry.uses_library(config.backend, registry.HOROVOD_LIBRARY) and facts.backends[config.backend].nccl is None:
        yield "the installed Horovod was built without NCCL: dualdist install-horovod --gpu --force"


@dataclass(frozen=True)
class PlannedJob:
    """A job to launch and the files in which its ranks leave their reports; `tags` say what the job measures."""

    title: str
    command: Command
    reports: tuple[Path, ...]
    tags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def command_line(self) -> str:
        """The command in shell syntax, with the values of secrets hidden."""
        words = redact_command(self.command.argv)
        if self.command.env:
            words = ["env", *(f"{name}={value}" for name, value in redact_variables(self.command.env).items()), *words]
        return shlex.join(words)


Done = list[tuple[PlannedJob, list[Report]]]


def group_reports(done: Done, *tags: str) -> dict[tuple[Any, ...], list[Report]]:
    """Return the reports of all launches by the values of these tags of their jobs, in the order of measurement."""
    groups: dict[tuple[Any, ...], list[Report]] = {}
    for planned, reports in done:
        groups.setdefault(tuple(planned.tags[tag] for tag in tags), []).extend(reports)
    return groups


def worker_command(
    config: RunConfig,
    measurement: str,
    options: StepOptions | TrainOptions | AllreduceOptions | StateOptions,
    report: Path,
    settings: MeasurementSettings,
) -> Command:
    """Return the command that runs the worker with these options on every rank."""
    spawn = (f"--spawn={settings.ranks}",) if config.launcher == SPAWN and not settings.placement.hosts else ()
    options = replace(options, device=settings.device, timeout_s=min(options.timeout_s, settings.timeout_s))
    program = ("-m", "dualdist.bench.ranks.worker", *spawn, measurement, str(report), json.dumps(asdict(options)))
    return program_command(config, program, settings)


def plan_launches(
    measurement: str,
    configs: Sequence[RunConfig],
    options: AllreduceOptions | StateOptions,
    settings: MeasurementSettings,
    folder: Path,
    *,
    launches: int,
) -> Iterator[PlannedJob]:
    """Yield one job per launch and configuration; every launch visits all configurations before the next."""
    for launch in range(launches):
        for config in configs:
            key = f"{config.backend}-{config.transport or 'own'}-{config.launcher}-{launch}"
            file = folder / f"{measurement}-{key}.json"
            command = worker_command(config, measurement, options, file, settings)
            title = f"{measurement} on {settings.ranks} ranks, {config}"
            yield PlannedJob(title, command, (file,), {"config": config, "launch": launch})


def program_command(config: RunConfig, program: tuple[str, ...], settings: MeasurementSettings) -> Command:
    """Return the command that runs the program on every rank, or once if it spawns its ranks."""
    spawns = config.launcher == SPAWN and not settings.placement.hosts
    site = replace(settings.site, task_cpus=settings.threads)
    ranks = 1 if spawns else settings.ranks
    no_gpu = HIDDEN if settings.device == "cpu" else {}
    env = {"OMP_NUM_THREADS": str(settings.threads), **no_gpu, **settings.env}
    job = Job(program, ranks, config.backend, config.transport, env)
    if settings.slow_link and ranks > 1:
        return wrap_in_slow_link(job, site, settings.slow_link)
    if settings.placement.hosts:
        return _command_on_hosts(config.launcher, job, site, settings.placement)
    return build_command("python" if spawns else config.launcher, job, site)


def _command_on_hosts(launcher: str, job: Job, site: Site, placement: Placement) -> Command:
    """Return the command that runs the job on other hosts: srun, or `dualdist run`, which reaches them by ssh."""
    if launcher == SRUN.name:
        env = {**interface_variables(placement.interface), **job.env}
        return build_command(launcher, replace(job, env=env, hosts=placement.hosts), site)
    words = ["run", "-np", str(job.ranks), "-H", str(placement), "--launcher", launcher, "--backend", str(job.backend)]
    given = {"--transport": job.transport, "--network-interface": placement.interface}
    words += [word for option, value in given.items() if value is not None for word in (option, value)]
    words += [word for name in job.env for word in ("--env", name)]
    return Command((site.python, "-m", "dualdist", *words, *job.program), job.env)


def run_job(planned: PlannedJob, timeout_s: float) -> list[Report]:
    """Run the job and return its reports; LaunchError, with the end of its output, if it failed or left none."""
    before, redact = read_cpu(children=True), make_redactor(planned.command.env)
    try:
        code, output = run_command(planned.command, timeout_s=timeout_s, what=planned.title)
    except LaunchError as error:
        raise LaunchError(redact(str(error))) from error
    foreign = foreign_cores([read_cpu(children=True).since(before)])
    missing = [path for path in planned.reports if not path.exists()]
    if code != 0 or missing:
        output = re.sub(f"^(?:{planned.command.prefix})", "", output.strip(), flags=re.MULTILINE)
        shown, exception = "\n".join(output.splitlines()[-OUTPUT_LINES:]), find_exception(output)
        if exception is not None and exception not in shown:  # torchrun prints about as many lines after it
            shown = f"{exception}\n[...]\n{shown}"
        why = f"exit code {code}" if code else "it left no report"
        raise LaunchError(f"{planned.title} failed ({why}): {planned.command_line}\n{redact(shown)}")
    return [{**json.loads(path.read_text()), FOREIGN: foreign} for path in planned.reports]
