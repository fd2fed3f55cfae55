"""Job scripts: the text that a person submits to a scheduler, rendered from templates/ for a ScriptRequest."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from dataclasses import dataclass

from dualdist.errors import UsageError
from dualdist.launch.env_defaults import FORWARDED, FORWARDED_PREFIXES, LAUNCHER_NAMES, LAUNCHER_PREFIXES
from dualdist.launch.schedulers.request import ScriptRequest
from dualdist.utils.redaction import SECRET
from dualdist.utils.suggest import require_choice


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
    """Return the scheduler of this name; UsageError lists the valid names."""
    return SCHEDULERS[require_choice(name, SCHEDULERS, "scheduler")]


def job_script(name: str, request: ScriptRequest) -> str:
    """Return the job script that runs the request under the scheduler; UsageError if the scheduler cannot run it."""
    scheduler = find_scheduler(name)
    require_choice(request.launcher, scheduler.launchers, "launcher", f" under {name}")
    if request.requeue is not None and scheduler.submit is None:
        raise UsageError(f"--requeue with the scheduler {name}: there is no queue; dualdist run has --max-restarts")
    _check_request(name, request)
    context = _kubernetes_context(request) if name == "kubernetes" else _shell_context(request)
    return _render(scheduler.template, r=request, **context)


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


def _check_request(name: str, request: ScriptRequest) -> None:
    """Raise UsageError for what this scheduler alone cannot run."""
    if name == "kubernetes":
        _check_kubernetes(request)
    elif request.launcher == "horovodrun" and request.transport == "mpi":
        raise UsageError("horovodrun with the transport mpi runs mpirun: choose the launcher mpirun itself")
    if name == "pbs" and request.requeue is not None and request.seconds is None:
        raise UsageError(f"--requeue {request.requeue} under PBS: its script looks at the clock; say --time, too")
    if name == "ssh" and len(request.hosts) != request.nodes:
        raise UsageError(f"{len(request.hosts)} hosts for {request.nodes} nodes: name each by -H host1:4,host2:4")
    if name == "workstation" and request.nodes != 1:
        raise UsageError(f"--nodes {request.nodes}: a workstation is one node; --scheduler ssh for several hosts")
    if request.launcher == "jsrun" and request.memory_mib is not None:
        raise UsageError("--memory under jsrun: its jobs have whole nodes, with all their memory; leave it out")
    if request.launcher == "jsrun" and request.node_gpus % request.tasks_per_node:
        raise UsageError(
            f"{request.node_gpus} GPUs for {request.tasks_per_node} tasks on each node: jsrun gives every rank the same"
        )


def _check_kubernetes(request: ScriptRequest) -> None:
    if request.container is None:
        raise UsageError("Kubernetes runs images: name one that has dualdist, --container registry/name:tag")
    if request.setup:
        raise UsageError("setup lines under Kubernetes: what they set up must be in the image; leave them out")
    if request.account is not None:
        raise UsageError("--account under Kubernetes: jobs belong to the namespace of kubectl; leave it out")
    if request.handed_on:
        raise UsageError(
            f"--env {request.handed_on[0]} under Kubernetes: pods see nothing of this shell; give a value, or a Secret "
            "of the cluster to the pods"
        )


def _shell_context(request: ScriptRequest) -> dict[str, object]:
    """Return what the templates of shell scripts need besides the request."""
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
    """Return what the template for Kubernetes needs besides the request."""
    variables, memory = request.variables(), request.memory_in("Gi", "Mi")
    limits = {"cpu": str(request.cpus_per_task * request.tasks_per_node)}
    limits |= {"memory": memory} if memory is not None else {}
    limits |= {"nvidia.com/gpu": str(request.node_gpus)} if request.node_gpus else {}
    # torchrun gives its ranks 30 seconds after SIGTERM by default.
    grace = {} if request.requeue is None else {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(request.requeue)}
    exported = [word for name in variables for word in ("-x", name)]
    mpirun = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "-n", str(request.size), *exported]
    name = re.sub(r"[^a-z0-9-]+", "-", request.title.lower()).strip("-") or "train"
    return {
        "generate_name": f"{name[:50]}-",
        "limits": limits,
        "mpirun_command": [*mpirun, "python", *request.program],
        "torchrun_variables": {**variables, **grace},
    }


__all__ = ["SCHEDULERS", "Scheduler", "ScriptRequest", "find_scheduler", "job_script"]
