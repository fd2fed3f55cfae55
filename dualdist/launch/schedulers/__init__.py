"""Job scripts: the text that a person submits to a scheduler, rendered from templates/ for a ScriptRequest.

To add a scheduler, write its template, and a Scheduler in SCHEDULERS.
"""

import json
import re
import shlex
import shutil
import subprocess
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, TypeVar

from dualdist.backends import registry
from dualdist.errors import LaunchError, UsageError
from dualdist.launch.env_defaults import FORWARDED, FORWARDED_PREFIXES, LAUNCHER_NAMES, LAUNCHER_PREFIXES
from dualdist.launch.job import (
    BACKEND_VARIABLE,
    TRANSPORT_VARIABLE,
    Host,
    check_job_name,
    check_word,
    find_resource_conflicts,
    layout_error,
    parse_duration,
    parse_mebibytes,
)
from dualdist.launch.launchers import ALL, find_conflicts
from dualdist.utils.redaction import SECRET
from dualdist.utils.suggest import require_choice

T = TypeVar("T")
SUBMIT_S = 120.0
LEAST = {"nodes": 1, "tasks_per_node": 1, "cpus_per_task": 1, "gpus_per_node": 0, "gpus_per_task": 0, "requeue": 1}
# Kubeflow's Training Operator (PyTorchJob, MPIJob), and its successor, Trainer (TrainJob).
KUBEFLOW = ("v1", "v2")
# Where Trainer's MPI plugin writes the list of hosts, and where it is asked to mount its keys.
MPI_HOSTFILE, SSH_KEYS = "/etc/mpi/hostfile", "/etc/mpi-ssh"
# The launcher's copy of the key, as ssh refuses one that others can read; a worker's own key; and the workers' port.
SSH_KEY, HOST_KEY, SSH_PORT = "/tmp/mpi-ssh-key", "/tmp/host-key", 2222


@dataclass(frozen=True)
class Scheduler:
    """A scheduler's template, and the launchers that its scripts use, the default first.

    `submit` is the command that takes the script on its standard input; None if a person runs the script.
    """

    template: str
    launchers: tuple[str, ...]
    submit: tuple[str, ...] | None


SCHEDULERS = {
    "slurm": Scheduler("slurm.sh.j2", ("srun", "torchrun", "mpirun", "horovodrun"), ("sbatch",)),
    "pbs": Scheduler("pbs.sh.j2", ("torchrun", "mpirun", "horovodrun"), ("qsub",)),
    "lsf": Scheduler("lsf.sh.j2", ("jsrun", "mpirun"), ("bsub",)),
    "kubernetes": Scheduler("kubernetes.yaml.j2", ("torchrun", "mpirun"), ("kubectl", "create", "-f", "-")),
    "ssh": Scheduler("ssh.sh.j2", ("torchrun", "mpirun", "horovodrun"), None),
    "workstation": Scheduler("workstation.sh.j2", ("torchrun", "mpirun", "horovodrun"), None),
}


def find_scheduler(name: str) -> Scheduler:
    return SCHEDULERS[require_choice(name, SCHEDULERS, "scheduler")]


@dataclass(frozen=True)
class ScriptRequest:
    """A Python program on `nodes` times `tasks_per_node` ranks, and the resources that they need.

    Attributes:
        program: what follows `python`.
        gpus_per_node, gpus_per_task: GPUs, requested in one of two ways.
        memory, memory_per_task: such as "64G", of a node or of a task.
        time: the time limit, [days-]hours:minutes:seconds.
        requeue: seconds before the time limit at which the job gets a notice to stop, to be queued again.
        setup: lines of shell that make `python` the one that has dualdist.
        container: an image that has dualdist.
        kubeflow: one of KUBEFLOW, for the scheduler kubernetes.
        hosts: host names, for the scheduler ssh.
        handed_on: names of variables whose values the script takes from the shell that submits it.
    """

    program: tuple[str, ...]
    launcher: str
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None
    cpus_per_task: int = 1
    memory: str | None = None
    memory_per_task: str | None = None
    time: str | None = None
    queue: str | None = None
    account: str | None = None
    setup: tuple[str, ...] = ()
    container: str | None = None
    backend: str | None = None
    transport: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    job_name: str | None = None
    handed_on: tuple[str, ...] = ()
    requeue: int | None = None
    kubeflow: str | None = None

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"--{name.replace('_', '-')} {value}: expected a whole number of {least} or more")
        if not self.program:
            raise UsageError("a job needs a program: a script, or -m and a module")
        _ = self.memory_mib, self.seconds
        for option, text, check in (
            ("--job-name", self.job_name, check_job_name),
            ("--partition", self.queue, check_word),
            ("--account", self.account, check_word),
            ("--container", self.container, check_word),
        ):
            if text is not None:
                _parse(option, text, check)
        for _, message in find_resource_conflicts(vars(self)):
            raise UsageError(message)

    @property
    def size(self) -> int:
        return self.nodes * self.tasks_per_node

    @property
    def layout(self) -> str:
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        ranks = "1 rank" if self.tasks_per_node == 1 else f"{self.tasks_per_node} ranks"
        return f"{nodes}, {ranks} on each"

    @property
    def title(self) -> str:
        """The job's name, by default the program's. It begins with a letter, as PBS requires."""
        is_module = self.program[0] == "-m" and len(self.program) > 1
        stem = self.program[1].rpartition(".")[2] if is_module else PurePath(self.program[0]).stem
        name = re.sub(r"[^A-Za-z0-9._-]", "-", stem).strip("-._")[:50] or "train"
        return self.job_name or (name if name[0].isalpha() else f"job-{name}")

    @property
    def node_gpus(self) -> int:
        return self.gpus_per_node or (self.gpus_per_task or 0) * self.tasks_per_node

    @property
    def uses_mpi(self) -> bool:
        return registry.needs_mpi(self.backend, self.transport)

    @property
    def memory_mib(self) -> int | None:
        """Memory of one node in MiB; None for the scheduler's default."""
        if self.memory is not None:
            return _parse("--memory", self.memory, parse_mebibytes)
        if self.memory_per_task is not None:
            return _parse("--memory-per-task", self.memory_per_task, parse_mebibytes) * self.tasks_per_node
        return None

    def memory_in(self, giga: str, mega: str) -> str | None:
        """Return the memory of one node in the scheduler's units, such as "64G" or "1500M"."""
        mib = self.memory_mib
        if mib is None:
            return None
        return f"{mib}{mega}" if mib % 1024 else f"{mib // 1024}{giga}"

    @property
    def seconds(self) -> int | None:
        """The time limit in seconds; None for the scheduler's default."""
        return None if self.time is None else _parse("--time", self.time, parse_duration)

    @property
    def clock(self) -> str | None:
        """The time limit as hours:minutes:seconds, which all batch schedulers read alike."""
        seconds = self.seconds
        return None if seconds is None else f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"

    def variables(self) -> dict[str, str]:
        chosen = {BACKEND_VARIABLE: self.backend, TRANSPORT_VARIABLE: self.transport}
        defaults = {"OMP_NUM_THREADS": str(self.cpus_per_task), "PYTHONUNBUFFERED": "1"}
        return {**defaults, **self.env, **{name: value for name, value in chosen.items() if value is not None}}


def _parse(option: str, text: str, parse: Callable[[str], T]) -> T:
    """Return parse(text); its ValueError, which says what was expected, becomes a UsageError."""
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: expected {error}") from error


def build_script_request(
    name: str,
    program: Sequence[str],
    *,
    launcher: str | None = None,
    ranks: int | None = None,
    hosts: Sequence[Host] = (),
    resources: Mapping[str, Any] | None = None,
    backend: str | None = None,
    transport: str | None = None,
    env: Mapping[str, str] | None = None,
    handed_on: Sequence[str] = (),
) -> ScriptRequest:
    """Return the request to the scheduler `name`, with `resources` as in a job file.

    The default launcher is the scheduler's first one, or the first that starts MPI if the job needs that. UsageError
    for options that exclude each other; the Horovod of the job's nodes is unknown here.
    """
    scheduler, needs_mpi = find_scheduler(name), registry.needs_mpi(backend, transport)
    launcher = launcher or next(each for each in scheduler.launchers if ALL[each].mpi != "never" or not needs_mpi)
    for _, message in find_conflicts(launcher, backend, transport, launchers=scheduler.launchers):
        raise UsageError(message)
    slots, listed = {host.slots for host in hosts}, ",".join(map(str, hosts))
    if hosts and name != "ssh":
        raise UsageError(f"hosts {listed}: {name} chooses the nodes itself; leave them out, and use --nodes")
    if len(slots) > 1:
        raise UsageError(f"hosts {listed}: a script needs the same number of slots on each, as host1:4,host2:4")
    given = {key: value for key, value in (resources or {}).items() if value is not None}
    if "partition" in given:
        given["queue"] = given.pop("partition")
    nodes = given.pop("nodes", len(hosts) or 1)
    tasks = given.pop("tasks_per_node", next(iter(slots), None))
    if error := layout_error(ranks, nodes, tasks):
        raise UsageError(error)
    if ranks is not None and nodes > 0:
        tasks = ranks // nodes
    elif tasks is None:
        tasks = given.get("gpus_per_node") or 1
    return ScriptRequest(
        tuple(program),
        launcher,
        nodes=nodes,
        tasks_per_node=tasks,
        hosts=tuple(host.name for host in hosts),
        setup=tuple(given.pop("setup", ())),
        backend=backend,
        transport=transport,
        env={key: value for key, value in (env or {}).items() if key not in handed_on},
        handed_on=tuple(handed_on),
        **given,
    )


def job_script(name: str, request: ScriptRequest) -> str:
    """Return the job script that runs the request under the scheduler; UsageError if the scheduler cannot run it."""
    scheduler = find_scheduler(name)
    require_choice(request.launcher, scheduler.launchers, "launcher", f" under {name}")
    if request.kubeflow is not None and name == "kubernetes":
        require_choice(request.kubeflow, KUBEFLOW, "version of Kubeflow's API")
    for message in _refusals(name, request):
        raise UsageError(message)
    if name != "kubernetes":
        return _render(scheduler.template, r=request, **_shell_context(request))
    if request.kubeflow == "v2":
        return _render("trainjob.yaml.j2", r=request, **_trainjob_context(request))
    return _render(scheduler.template, r=request, **_kubernetes_context(request))


def _render(template: str, **context: object) -> str:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined  # 60 ms, and only job scripts need it
    except ImportError as error:
        raise UsageError("job scripts need jinja2: pip install 'dualdist[job]'") from error

    environment = Environment(
        loader=PackageLoader(__name__),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{##",  # as ${#array[@]} is bash
        comment_end_string="##}",
    )
    environment.filters |= {"shell": shlex.join, "json": json.dumps}
    return environment.get_template(template).render(context).lstrip()


def _refusals(name: str, request: ScriptRequest) -> Iterator[str]:
    """Yield what the scheduler or its launcher cannot run."""
    yield from _launcher_refusals(request)
    if name == "kubernetes":
        yield from _kubernetes_refusals(request)
    elif request.kubeflow is not None:
        yield f"--kubeflow {request.kubeflow} with the scheduler {name}: it is for kubernetes; leave it out"
    if request.requeue is not None and SCHEDULERS[name].submit is None:
        yield f"--requeue with the scheduler {name}: there is no queue; dualdist run has --max-restarts"
    if request.requeue is not None and name == "pbs" and request.seconds is None:
        yield f"--requeue {request.requeue} under PBS: its script looks at the clock; say --time, too"
    if name == "ssh" and len(request.hosts) != request.nodes:
        yield f"{len(request.hosts)} hosts for {request.nodes} nodes: name each by -H host1:4,host2:4"
    if name == "workstation" and request.nodes != 1:
        yield f"--nodes {request.nodes}: a workstation is one node; --scheduler ssh for several hosts"


def _launcher_refusals(request: ScriptRequest) -> Iterator[str]:
    launcher, gpus = request.launcher, request.node_gpus
    if launcher == "torchrun" and request.gpus_per_task:
        yield (
            f"--gpus-per-task {request.gpus_per_task}: torchrun is one task on each node, and its ranks see all GPUs: "
            f"--gpus-per-node {gpus}"
        )
    if launcher == "horovodrun" and request.container:
        yield (
            "horovodrun starts ranks by ssh, outside of any container: choose another launcher, "
            "the backend horovod runs under all of them"
        )
    if launcher == "horovodrun" and request.transport == "mpi":
        yield "horovodrun with the transport mpi runs mpirun: choose the launcher mpirun itself"
    if launcher == "jsrun" and request.memory_mib is not None:
        yield "--memory under jsrun: its jobs have whole nodes, with all their memory; leave it out"
    if launcher == "jsrun" and gpus % request.tasks_per_node:
        yield f"{gpus} GPUs for {request.tasks_per_node} tasks on each node: jsrun gives every rank the same"


def _kubernetes_refusals(request: ScriptRequest) -> Iterator[str]:
    if request.container is None:
        yield "Kubernetes runs images: name one that has dualdist, --container registry/name:tag"
    if request.setup:
        yield "setup lines under Kubernetes: what they set up must be in the image; leave them out"
    if request.account is not None:
        yield "--account under Kubernetes: jobs belong to the namespace of kubectl; leave it out"
    if request.handed_on:
        yield (
            f"--env {request.handed_on[0]} under Kubernetes: pods see nothing of this shell; give a value, or a Secret "
            "of the cluster to the pods"
        )


def _shell_context(request: ScriptRequest) -> dict[str, object]:
    given = [shlex.quote(f"{name}={value}") for name, value in request.variables().items()]
    inherited = [f'"{name}=${{{name}?is not set where this was submitted}}"' for name in request.handed_on]
    prefixes = (f"{prefix}*" for prefix in (*LAUNCHER_PREFIXES, *FORWARDED_PREFIXES))
    patterns = textwrap.wrap(" | ".join([*LAUNCHER_NAMES, *FORWARDED, *prefixes]), 100)
    return {
        "variables": " ".join([*given, *inherited]),
        "in_container": '"${container[@]}" ' if request.container else "",
        "secret_pattern": shlex.quote(SECRET),
        "forwarded_patterns": " \\\n        ".join(patterns),
        "by_clock": False,
    }


def _kubernetes_context(request: ScriptRequest) -> dict[str, object]:
    return {
        "generate_name": f"{_object_name(request)[:50]}-",
        "limits": _limits(request),
        "mpirun_command": ["mpirun", *_mpirun_words(request)],
        "torchrun_variables": _torchrun_variables(request),
    }


def _trainjob_context(request: ScriptRequest) -> dict[str, object]:
    variables = _torchrun_variables(request)
    if request.launcher == "mpirun":
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR")
        agent = " ".join(["ssh", "-p", str(SSH_PORT), "-i", SSH_KEY, *(f"-o{option}" for option in options)])
        # Open MPI 4 reads the first, Open MPI 5 the second, which knows nothing of the plugin's variables either.
        agents = {"OMPI_MCA_plm_rsh_agent": agent, "PRTE_MCA_plm_ssh_agent": agent}
        variables = {**request.variables(), **agents}
    return {
        # Kubernetes adds up to 20 characters to the names of pods, which have at most 63.
        "name": _object_name(request)[:40].strip("-"),
        "limits": _limits(request),
        # By its full path, mpirun tells its daemons where Open MPI lies. They have the PATH of an ssh session.
        "launcher_script": f'install -m 600 {SSH_KEYS}/id_rsa {SSH_KEY} && exec "$(command -v mpirun)" "$@"',
        "mpirun_args": ["--hostfile", MPI_HOSTFILE, "-x", "PATH", *_mpirun_words(request)],
        "trainer_variables": variables,
        "ssh_keys": SSH_KEYS,
        "host_key": HOST_KEY,
        "ssh_port": SSH_PORT,
    }


def _object_name(request: ScriptRequest) -> str:
    """Return the job's name as Kubernetes allows it."""
    name = re.sub(r"[^a-z0-9-]+", "-", request.title.lower()).strip("-") or "train"
    return name if name[0].isalpha() else f"job-{name}"


def _limits(request: ScriptRequest) -> dict[str, str]:
    memory = request.memory_in("Gi", "Mi")
    limits = {"cpu": str(request.cpus_per_task * request.tasks_per_node)}
    limits |= {"memory": memory} if memory is not None else {}
    return limits | ({"nvidia.com/gpu": str(request.node_gpus)} if request.node_gpus else {})


def _torchrun_variables(request: ScriptRequest) -> dict[str, str]:
    # torchrun gives its ranks 30 seconds after SIGTERM by default.
    grace = {} if request.requeue is None else {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(request.requeue)}
    return {**request.variables(), **grace}


def _mpirun_words(request: ScriptRequest) -> list[str]:
    """Return what follows mpirun in a launcher pod."""
    exported = [word for name in request.variables() for word in ("-x", name)]
    flags = ["--allow-run-as-root", "--bind-to", "none", "-n", str(request.size), *exported]
    return [*flags, "python", "-m", "dualdist", "exec", *request.program]


def submit_script(name: str, text: str) -> str:
    """Submit a script, and return what the scheduler printed; LaunchError if it refuses the job."""
    argv = find_scheduler(name).submit
    if argv is None:
        raise UsageError(f"--submit with the scheduler {name}: it has no queue; use --write FILE, and run that")
    if shutil.which(argv[0]) is None:
        raise LaunchError(
            f"{argv[0]} was not found on PATH: log in to a host of the cluster, or take the text there by --write FILE"
        )
    try:
        done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=SUBMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{shlex.join(argv)} failed: {error}") from error
    if done.returncode != 0:
        output = (done.stderr + done.stdout).strip() or "no output"
        raise LaunchError(f"{shlex.join(argv)} refused the job with exit code {done.returncode}: {output}")
    return done.stdout + done.stderr
