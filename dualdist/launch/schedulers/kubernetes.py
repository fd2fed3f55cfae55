"""Kubernetes: the jobs of Kubeflow's operators, PyTorchJob, MPIJob and TrainJob."""

import re
from collections.abc import Iterator

from dualdist.launch.script_request import ScriptRequest

# Where Trainer's MPI plugin writes the list of hosts, and where it is asked to mount its keys.
MPI_HOSTFILE, SSH_KEYS = "/etc/mpi/hostfile", "/etc/mpi-ssh"
# The launcher's copy of the key, as ssh refuses one that others can read; a worker's own key; and the workers' port.
SSH_KEY, HOST_KEY, SSH_PORT = "/tmp/mpi-ssh-key", "/tmp/host-key", 2222


def refusals(request: ScriptRequest) -> Iterator[str]:
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


def template(request: ScriptRequest) -> tuple[str, dict[str, object]]:
    """Return the name of the template for the version of Kubeflow, and its variables."""
    if request.kubeflow == "v2":
        return "trainjob.yaml.j2", _trainjob_context(request)
    return "kubernetes.yaml.j2", {
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
