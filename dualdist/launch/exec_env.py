"""The variables that a program finds under `dualdist exec`: torchrun's, and what libraries read beside them."""

import json
import os
import threading
from collections.abc import Mapping, MutableMapping

from dualdist.environments import EXEC_VARIABLES, detect, without_exec
from dualdist.environments.env_values import MASTER, get_integer, get_main_address, get_value
from dualdist.environments.horovodrun import ELASTIC
from dualdist.environments.torchrun import RUN_ID, VARIABLES
from dualdist.errors import UsageError
from dualdist.rendezvous.exec_rendezvous import ExecRendezvous, meet, reserve_port
from dualdist.topology import Topology
from dualdist.utils.deadline import Deadline
from dualdist.utils.machine import package_version
from dualdist.utils.network_interfaces import LOOPBACK

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
# Without it and without a GPU, Accelerator() takes each rank for a job of one.
ACCELERATE_CPU = "ACCELERATE_USE_CPU"
VISIBLE, HIDE_ALL = "CUDA_VISIBLE_DEVICES", ("", "-1")
# Of NVIDIA's, AMD's, WSL's, Intel's, Huawei's and Habana's accelerators.
DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/dri", "/dev/davinci_manager", "/dev/accel")


def prepare(environ: MutableMapping[str, str], timeout_s: float) -> tuple[Topology, dict[str, str]]:
    """Find this rank, meet the others where needed, and set variables in `environ`, which are returned.

    Every rank calls this. MASTER_ADDR and MASTER_PORT keep the values that they have. Errors are those of dd.init().
    """
    if not 0 < timeout_s <= threading.TIMEOUT_MAX:
        raise UsageError(f"--timeout {timeout_s}: expected seconds above 0 and below {threading.TIMEOUT_MAX:g}")
    given = dict(without_exec(environ))
    topology = detect(given)
    if topology.size > 1 and given.get(ELASTIC) == "1":
        return topology, {}  # Horovod's ranks come and go, torch's cannot
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


def program_variables(given: Mapping[str, str], rendezvous: ExecRendezvous) -> dict[str, str]:
    """Return the variables that a program gets beside those that are given, or in place of other values of them."""
    topology, main = rendezvous.topology, get_main_address(given)
    values = topology_variables(topology)
    values[MASTER[0]] = get_value(given, MASTER[0]) or rendezvous.address
    values[MASTER[1]] = str(rendezvous.port if main is None else main.port)
    defaults = {RUN_ID: "dualdist-exec"}
    if rendezvous.interface is not None:
        defaults[GLOO_INTERFACE] = rendezvous.interface
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
    return not is_cpu_build and environ.get(VISIBLE) not in HIDE_ALL and any(map(os.path.exists, DEVICES))
