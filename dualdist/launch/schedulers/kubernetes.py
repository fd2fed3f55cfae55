"""Kubernetes: a PyTorchJob (kubeflow.org/v1) with torchrun, or an MPIJob (kubeflow.org/v2beta1) with mpirun."""

from __future__ import annotations

import json
import re

from dualdist.errors import UsageError
from dualdist.launch.schedulers.request import ScriptRequest, format_memory
from dualdist.launch.schedulers.shell import EDIT_BEGIN, EDIT_END, sizes

GPU = "nvidia.com/gpu"
# Pods have 64 MiB of shared memory unless a volume in memory takes its place.
SHARED = "/dev/shm"
# How often a job that can go on is started again, whatever ended it.
RESTARTS = 10


def script(request: ScriptRequest) -> str:
    """The YAML for kubectl."""
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
    if request.launcher == "mpirun":
        return _mpi_job(request)
    return _pytorch_job(request)


def _pytorch_job(request: ScriptRequest) -> str:
    """The operator tells torchrun in each pod of the others, by PET_ variables."""
    replicas = [f"    Worker:\n      replicas: {request.nodes - 1} # and one more, the master"] * (request.nodes > 1)
    first = "Worker" if request.nodes > 1 else "Master"
    head = replicas or ["    Master:\n      replicas: 1"]
    lines = [
        f"# Kubernetes, PyTorchJob of Kubeflow's training operator: {sizes(request)}, a pod.",
        "# Made by `dualdist run --scheduler`, see launch/README.md.",
        EDIT_BEGIN,
        "apiVersion: kubeflow.org/v1",
        "kind: PyTorchJob",
        *_metadata(request),
        "spec:",
        f"  nprocPerNode: {json.dumps(str(request.tasks_per_node))}",
        *_policy(request),
        "  pytorchReplicaSpecs:",
        *head,
        f"      restartPolicy: {_restarts(request)}",
        *_pod(request, "pytorch", ["torchrun", *request.program], indent=6, anchor="&pod"),
        EDIT_END,
    ]
    if first == "Worker":
        policy = f"      restartPolicy: {_restarts(request)}"
        lines += ["    Master:", "      replicas: 1", policy, "      template: *pod"]
    return "\n".join(lines) + "\n"


def _mpi_job(request: ScriptRequest) -> str:
    """The launcher's mpirun reaches the workers by ssh, with keys that the operator makes; the image has an sshd."""
    given = [word for name in request.variables() for word in ("-x", name)]
    root = ["--allow-run-as-root", "--bind-to", "none"]
    run = ["mpirun", *root, "-n", str(request.size), *given, "python", *request.program]
    lines = [
        f"# Kubernetes, MPIJob of Kubeflow's MPI operator: {sizes(request)}, a pod.",
        "# Made by `dualdist run --scheduler`, see launch/README.md.",
        EDIT_BEGIN,
        "apiVersion: kubeflow.org/v2beta1",
        "kind: MPIJob",
        *_metadata(request),
        "spec:",
        f"  slotsPerWorker: {request.tasks_per_node}",
        "  mpiImplementation: OpenMPI",
        *_policy(request),
        "  mpiReplicaSpecs:",
        "    Launcher:",
        "      replicas: 1",
        f"      restartPolicy: {_restarts(request)}",
        "      template:",
        "        spec:",
        "          containers:",
        "            - name: launcher",
        f"              image: &image {json.dumps(request.container)}",
        f"              command: {json.dumps(run)} # -n: workers times slots",
        *_env(request, 14),
        "    Worker:",
        f"      replicas: {request.nodes}",
        "      restartPolicy: Never",
        *_pod(request, "worker", ["/usr/sbin/sshd", "-De"], indent=6, image="*image"),
        EDIT_END,
    ]
    return "\n".join(lines) + "\n"


def _metadata(request: ScriptRequest) -> list[str]:
    name = re.sub(r"[^a-z0-9-]+", "-", request.title.lower()).strip("-") or "train"
    queue = ["  labels:", f"    kueue.x-k8s.io/queue-name: {json.dumps(request.queue)}"] if request.queue else []
    return ["metadata:", f"  generateName: {name[:50]}-", *queue]


def _policy(request: ScriptRequest) -> list[str]:
    seconds = request.seconds()
    limit = [f"    activeDeadlineSeconds: {seconds}"] if seconds is not None else []
    limit += [f"    backoffLimit: {RESTARTS}"] * (request.requeue is not None)
    return ["  runPolicy:", "    cleanPodPolicy: Running", *limit]


def _restarts(request: ScriptRequest) -> str:
    """OnFailure: what stops, or is lost, starts again in its place, and the ranks go on from their checkpoint."""
    return "Never" if request.requeue is None else "OnFailure"


def _env(request: ScriptRequest, indent: int) -> list[str]:
    given = request.variables()
    if request.requeue is not None and request.launcher == "torchrun":  # it gives its ranks 30 seconds if left alone
        given["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(request.requeue)
    pairs = [f"  - {{name: {name}, value: {json.dumps(value)}}}" for name, value in given.items()]
    return [" " * indent + line for line in ("env:", *pairs)]


def _pod(
    request: ScriptRequest, name: str, command: list[str], *, indent: int, anchor: str = "", image: str | None = None
) -> list[str]:
    memory = request.node_memory_mib()
    limits = {"cpu": str(request.cpus_per_task * request.tasks_per_node)}
    limits |= {"memory": format_memory(memory, giga="Gi", mega="Mi")} if memory is not None else {}
    limits |= {GPU: str(request.node_gpus)} if request.node_gpus else {}
    # Between the notice, SIGTERM, and the end of a pod.
    grace = [f"    terminationGracePeriodSeconds: {request.requeue}"] * (request.requeue is not None)
    lines = [
        f"template: {anchor}".rstrip(),
        "  spec:",
        *grace,
        "    containers:",
        f"      - name: {name}",
        f"        image: {image or json.dumps(request.container)}",
        f"        command: {json.dumps(command)}",
        *_env(request, 8),
        "        resources:",
        f"          limits: {json.dumps(limits)}",
        "        volumeMounts:",
        f"          - {{name: shared, mountPath: {SHARED}}}",
        "    volumes:",
        "      - {name: shared, emptyDir: {medium: Memory}}",
    ]
    return [" " * indent + line for line in lines]
