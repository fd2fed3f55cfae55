"""The variables that a program finds under `dualdist exec`: torchrun's, and what libraries read beside them."""

import json
import os
import threading
from collections.abc import Mapping, MutableMapping
from importlib.metadata import entry_points

from dualdist.backends import registry
from dualdist.environments import EXEC_VARIABLES, detect, without_exec
from dualdist.environments.env_values import MASTER, get_integer, get_main_address, get_value
from dualdist.environments.horovodrun import ELASTIC
from dualdist.environments.torchrun import RUN_ID, VARIABLES
from dualdist.environments.visible_devices import hides_all
from dualdist.errors import UsageError
from dualdist.liveness.joined_rank import refuse_child
from dualdist.rendezvous.exec_rendezvous import ExecRendezvous, meet, reserve_port
from dualdist.topology import Topology
from dualdist.utils.deadline import Deadline
from dualdist.utils.machine import cores_per_rank, package_version
from dualdist.utils.network_interfaces import LOOPBACK, without_brackets
from dualdist.utils.variables import THREADS, TORCH_BACKEND

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
# Without it and without a GPU, Accelerator() takes each rank for a job of one.
ACCELERATE_CPU = "ACCELERATE_USE_CPU"
# Of torch: with 0 it calls no entry points, by which dualdist/c10d registers itself.
AUTOLOAD, C10D = "TORCH_DEVICE_BACKEND_AUTOLOAD", "dualdist.c10d:register"
# Of NVIDIA's, AMD's, WSL's, Intel's, Huawei's and Habana's accelerators.
DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/dri", "/dev/davinci_manager", "/dev/accel")


def prepare(environ: MutableMapping[str, str], timeout_s: float) -> tuple[Topology, dict[str, str]]:
    """Find this rank, meet the others where needed, and set variables in `environ`, which are returned.

    Every rank calls this. MASTER_ADDR and MASTER_PORT keep the values that they have, but for brackets. Errors are
    those of dd.init().
    """
    if not 0 < timeout_s <= threading.TIMEOUT_MAX:
        raise UsageError(f"--timeout {timeout_s}: expected seconds above 0 and below {threading.TIMEOUT_MAX:g}")
    given = dict(without_exec(environ))
    topology = detect(given)
    refuse_child(environ, topology)
    if topology.size > 1 and (given.get(ELASTIC) == "1" or topology.rendezvous == "run"):
        return topology, {}  # ranks of elastic jobs come and go, torch's cannot
    main = get_main_address(given)
    if topology.size > 1 and (main is None or topology.inferred):
        rendezvous = meet(topology, environ, Deadline(timeout_s))
    else:
        wanted = get_integer(given, MASTER[1]) or 0
        rendezvous = ExecRendezvous(LOOPBACK, reserve_port(wanted) if main is None else wanted, topology)
    variables = program_variables(given, rendezvous)
    environ.update(variables)
    environ[EXEC_VARIABLES] = json.dumps(variables)
    return rendezvous.topology, variables


def check_torch_backend(environ: Mapping[str, str]) -> None:
    """Raise UsageError if the backend that the variable names cannot take the place of a program's."""
    name = environ.get(TORCH_BACKEND)
    if not name:
        return
    ours = (*registry.choices(), *registry.transports())
    if name in ours and name not in ("gloo", "nccl", "mpi"):
        raise UsageError(
            f"{name} is no backend of torch.distributed: type --torch-backend dualdist, whose tensors go by what "
            "DUALDIST_BACKEND and DUALDIST_TRANSPORT name"
        )
    if environ.get(AUTOLOAD) == "0":
        raise UsageError(f"{AUTOLOAD}=0 keeps torch from loading what --torch-backend needs: unset it")
    if not any(point.value == C10D for point in entry_points(group="torch.backends")):
        raise UsageError(
            "--torch-backend needs dualdist to be installed in this Python: pip install -e /path/to/dualdist"
        )


def program_variables(given: Mapping[str, str], rendezvous: ExecRendezvous) -> dict[str, str]:
    """Return the variables that a program gets beside those that are given, or in place of other values of them."""
    topology, main = rendezvous.topology, get_main_address(given)
    values = topology_variables(topology)
    values[MASTER[0]] = without_brackets(get_value(given, MASTER[0]) or rendezvous.address)
    values[MASTER[1]] = str(rendezvous.port if main is None else main.port)
    defaults = {RUN_ID: "dualdist-exec"}
    if rendezvous.interface is not None:
        defaults[GLOO_INTERFACE] = rendezvous.interface
    if topology.local_size > 1:
        defaults[THREADS] = str(cores_per_rank(topology.local_size))
    if topology.size > 1 and not _has_accelerator(given):
        defaults[ACCELERATE_CPU] = "true"
    values |= {name: value for name, value in defaults.items() if get_value(given, name) is None}
    return {name: value for name, value in values.items() if given.get(name) != value}


def topology_variables(topology: Topology) -> dict[str, str]:
    """Return torchrun's variables of a rank, and NODE_RANK and LOCAL_SIZE, which Lightning and DeepSpeed read."""
    numbers = {name: getattr(topology, field) for field, name in VARIABLES.by_field().items()}
    numbers |= {"NODE_RANK": topology.node_rank, "LOCAL_SIZE": topology.local_size}
    return {name: str(number) for name, number in numbers.items()}


def _has_accelerator(environ: Mapping[str, str]) -> bool:
    """Return True if torch may find an accelerator, judged without importing it."""
    is_cpu_build = (package_version("torch") or "").endswith("+cpu")
    return not is_cpu_build and not hides_all(environ) and any(map(os.path.exists, DEVICES))
