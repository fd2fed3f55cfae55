"""Job scripts: the text that a person submits to a scheduler, rendered from templates/ for a ScriptRequest.

To add a scheduler, write its template, and a Scheduler in SCHEDULERS.
"""

import json
import shlex
import shutil
import subprocess
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dualdist.backends import registry
from dualdist.errors import LaunchError, UsageError
from dualdist.launch.env_defaults import (
    FORWARDED,
    FORWARDED_PREFIXES,
    LAUNCHER_NAMES,
    LAUNCHER_PREFIXES,
    interface_variables,
)
from dualdist.launch.launchers import ALL, find_conflicts
from dualdist.launch.run_request import RunRequest
from dualdist.launch.schedulers import kubernetes
from dualdist.launch.schedulers.directives import directive_lines, requested_gpus, requests_gpus
from dualdist.launch.script_request import ScriptRequest
from dualdist.utils.redaction import SECRET
from dualdist.utils.suggest import require_choice

SUBMIT_S = 120.0


def _pbs_refusals(request: ScriptRequest) -> Iterator[str]:
    if request.requeue is not None and request.time is None:
        yield f"--requeue {request.requeue} under PBS: its script looks at the clock; say --time, too"


def _ssh_refusals(request: ScriptRequest) -> Iterator[str]:
    if len(request.hosts) != request.nodes:
        yield f"{len(request.hosts)} hosts for {request.nodes} nodes: name each by -H host1:4,host2:4"


def _workstation_refusals(request: ScriptRequest) -> Iterator[str]:
    if request.nodes != 1:
        yield f"--nodes {request.nodes}: a workstation is one node; --scheduler ssh for several hosts"


def _shell_template(name: str) -> Callable[[ScriptRequest], tuple[str, dict[str, object]]]:
    return lambda request: (name, _shell_context(request))


@dataclass(frozen=True)
class Scheduler:
    """A scheduler.

    Attributes:
        template: returns the name of the template for a request, and its variables.
        launchers: those that its scripts use, the default first.
        submit: the command that takes the script on its standard input; None if a person runs the script.
        refusals: yields an error message for each thing that it cannot do.
        takes_hosts: its scripts name the hosts.
    """

    template: Callable[[ScriptRequest], tuple[str, dict[str, object]]]
    launchers: tuple[str, ...]
    submit: tuple[str, ...] | None
    refusals: Callable[[ScriptRequest], Iterator[str]] = lambda request: iter(())
    takes_hosts: bool = False


SCHEDULERS = {
    "slurm": Scheduler(_shell_template("slurm.sh.j2"), ("srun", "torchrun", "mpirun", "horovodrun"), ("sbatch",)),
    "pbs": Scheduler(_shell_template("pbs.sh.j2"), ("torchrun", "mpirun", "horovodrun"), ("qsub",), _pbs_refusals),
    "lsf": Scheduler(_shell_template("lsf.sh.j2"), ("jsrun", "mpirun"), ("bsub",)),
    "kubernetes": Scheduler(
        kubernetes.template, ("torchrun", "mpirun"), ("kubectl", "create", "-f", "-"), kubernetes.refusals
    ),
    "ssh": Scheduler(_shell_template("ssh.sh.j2"), ("torchrun", "mpirun", "horovodrun"), None, _ssh_refusals, True),
    "workstation": Scheduler(
        _shell_template("workstation.sh.j2"), ("torchrun", "mpirun", "horovodrun"), None, _workstation_refusals
    ),
}


def find_scheduler(name: str) -> Scheduler:
    return SCHEDULERS[require_choice(name, SCHEDULERS, "scheduler")]


def build_script_request(name: str, request: RunRequest, handed_on: Sequence[str] = ()) -> ScriptRequest:
    """Return the request to the scheduler `name`; the script takes the variables `handed_on` from who submits it.

    The default launcher is the scheduler's first one, or the first that starts MPI if the job needs that. UsageError
    for options that exclude each other; the Horovod of the job's nodes is unknown here.
    """
    scheduler, backend, transport = find_scheduler(name), request.backend, request.transport
    needs_mpi = registry.needs_mpi(backend, transport)
    usable = (each for each in scheduler.launchers if ALL[each].mpi != "never" or not needs_mpi)
    launcher = request.launcher or next(usable)
    for _, message in find_conflicts(launcher, backend, transport, launchers=scheduler.launchers):
        raise UsageError(message)
    slots, listed = {host.slots for host in request.hosts}, ",".join(map(str, request.hosts))
    if request.hosts and not scheduler.takes_hosts:
        raise UsageError(f"hosts {listed}: {name} chooses the nodes itself; leave them out, and use --nodes")
    if len(slots) > 1:
        raise UsageError(f"hosts {listed}: a script needs the same number of slots on each, as host1:4,host2:4")
    resources, ranks = dict(request.resources), request.ranks
    nodes = resources.pop("nodes", len(request.hosts) or 1)
    tasks = resources.pop("tasks_per_node", next(iter(slots), None))
    if ranks is not None and (ranks % nodes or tasks not in (None, ranks // nodes)):
        on_each = "the same number" if tasks is None else str(tasks)
        raise UsageError(f"{ranks} ranks on {nodes} nodes with {on_each} on each: the numbers do not agree")
    if tasks is None:
        directives = resources.get("directives", ())
        gpus = resources.get("gpus_per_node") or requested_gpus(name, directives)
        if ranks is None and not gpus and requests_gpus(name, directives):
            raise UsageError("a directive requests GPUs in a form that does not say how many a node has: give -np")
        tasks = gpus or 1 if ranks is None else ranks // nodes
    env = {**interface_variables(request.network_interface), **request.env}
    return ScriptRequest(
        request.python_words(is_local=False),
        launcher,
        nodes=nodes,
        tasks_per_node=tasks,
        hosts=tuple(host.name for host in request.hosts),
        backend=backend,
        transport=transport,
        env={key: value for key, value in env.items() if key not in handed_on},
        handed_on=tuple(handed_on),
        **resources,
    )


def job_script(name: str, request: ScriptRequest) -> str:
    """Return the job script that runs the request under the scheduler; UsageError if the scheduler cannot run it."""
    scheduler = find_scheduler(name)
    require_choice(request.launcher, scheduler.launchers, "launcher", f" under {name}")
    for message in (*ALL[request.launcher].script_refusals(request), *scheduler.refusals(request)):
        raise UsageError(message)
    if request.kubeflow is not None and name != "kubernetes":
        raise UsageError(f"--kubeflow {request.kubeflow} with the scheduler {name}: it is for kubernetes; leave it out")
    if request.requeue is not None and scheduler.submit is None:
        raise UsageError(f"--requeue with the scheduler {name}: there is no queue; dualdist run has --max-restarts")
    template, context = scheduler.template(request)
    has_gpus = bool(request.node_gpus) or requests_gpus(name, request.directives)
    return _render(template, r=request, has_gpus=has_gpus, directives=directive_lines(name, request), **context)


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
