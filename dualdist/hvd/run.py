"""`horovod.run`: run a function on several ranks of this host and return the results."""

import pickle
import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dualdist.errors import UsageError
from dualdist.hvd.alias import install
from dualdist.launch.spawn import call_pickled, choose_pickler, spawn_without_main
from dualdist.utils.horovod_names import FOLDER

INSTEAD = "`dualdist run --as-horovod script.py` starts a script under a launcher"
WITHOUT_MPI = (
    "run() starts these ranks itself, without MPI, as for use_gloo; `mpirun -np 2 python -m dualdist.hvd script.py` "
    "starts the ranks of a script with MPI"
)
ELASTIC_OPTIONS = "min_num_proc max_num_proc slots reset_limit cooldown_range host_discovery_script min_np max_np"
# The reasons why options are refused unless they have their defaults.
REFUSED = {
    **dict.fromkeys(ELASTIC_OPTIONS.split(), "ranks that come and go are not supported here"),
    "hostfile": "the ranks run on this host",
    "mpi_args": "no MPI starts these ranks",
    "output_filename": "the ranks print where this process prints",
}


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Run func(*args, **kwargs) on `num_proc` new ranks of this host; returns their results in rank order.

    func, args, kwargs and the results are pickled, by cloudpickle if it is installed: then func may be a lambda, a
    closure or a function of a notebook. Returns when all ranks have ended.

    Args:
        func: the function that each rank runs.
        args, kwargs: its arguments.
        num_proc: the number of ranks; `np` is its deprecated name.
        hosts: may name this host only, with enough slots, such as "localhost:2".
        use_mpi: the ranks are started as with use_gloo, after a warning.
        start_timeout, ssh_port, ssh_identity_file, disable_cache, verbose, network_interface, network_interfaces:
            ignored.

    Raises:
        LaunchError: a rank failed; the others were ended. A RuntimeError with the rank and its traceback.
        UsageError: an option that is not supported: elastic options, `mpi_args`, `output_filename`,
            `hostfile`, another `executable` or host. A ValueError.
    """
    given = dict(locals())
    for name, reason in REFUSED.items():
        if (value := given[name]) is not None and value is not False:
            raise UsageError(f"{name}={value!r}: {reason}; leave it out ({INSTEAD})")
    if executable not in (None, sys.executable):
        raise UsageError(f"executable={executable!r}: the ranks run by {sys.executable}, as this process does")
    if use_gloo and use_mpi:
        raise UsageError("use_gloo and use_mpi exclude each other: give one of them")
    if use_mpi:
        warnings.warn(f"use_mpi=True: {WITHOUT_MPI}", UserWarning, stacklevel=2)
    if np is not None:
        warnings.warn("np is deprecated, use num_proc", DeprecationWarning, stacklevel=2)
        num_proc = np
    if hosts is not None:
        _check_hosts(hosts, num_proc)
    payload = choose_pickler(func).dumps((func, tuple(args), dict(kwargs or {})))
    return [pickle.loads(result) for result in spawn_without_main(_call, num_proc, (payload,))]


def _call(payload: bytes) -> bytes:
    if FOLDER in sys.path:
        install()  # the caller has the alias, too; before loading func imports what it needs
    return call_pickled(payload)


def _check_hosts(hosts: str, num_proc: int) -> None:
    """Raise UsageError unless `hosts` is this host, with enough slots."""
    name = socket.gethostname()
    own = {"localhost", "127.0.0.1", "::1", name, name.split(".")[0]}
    total = 0
    for text in hosts.split(","):
        host, _, slots = (part.strip() for part in text.rpartition(":"))
        if not (host and slots.isdigit()):
            raise UsageError(f"{text!r} in hosts: expected a host and its slots, as in 'localhost:2'")
        if host.strip("[]") not in own:
            raise UsageError(f"hosts: {host!r} is not this host ({name}), and run() starts ranks here only; {INSTEAD}")
        total += int(slots)
    if total < num_proc:
        raise UsageError(f"hosts: {total} slots are too few for num_proc={num_proc}")
