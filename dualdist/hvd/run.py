"""`horovod.run`: run a function on several ranks of this host and return the results."""

from __future__ import annotations

import pickle
import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dualdist.errors import UsageError
from dualdist.hvd.alias import install
from dualdist.launch.spawn import choose_pickler, spawn_without_main
from dualdist.utils.horovod_names import FOLDER

INSTEAD = "`dualdist run --as-horovod script.py` starts a script under a launcher"
# The reasons why options are refused unless they have their defaults.
ELASTIC = "ranks that come and go are not supported here"
REFUSED = {
    "min_num_proc": ELASTIC,
    "max_num_proc": ELASTIC,
    "slots": ELASTIC,
    "reset_limit": ELASTIC,
    "cooldown_range": ELASTIC,
    "host_discovery_script": ELASTIC,
    "min_np": ELASTIC,
    "max_np": ELASTIC,
    "mpi_args": "no MPI starts these ranks",
    "use_mpi": "no MPI starts these ranks",
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
        hosts, hostfile: may name this host only, with enough slots.
        start_timeout, ssh_port, ssh_identity_file, disable_cache, verbose, network_interface, network_interfaces:
            ignored.

    Raises:
        LaunchError: a rank failed; the others were ended. A RuntimeError with the rank and its traceback.
        UsageError: an option that is not supported: elastic options, `use_mpi`, `mpi_args`, `output_filename`, another
            `executable` or host. A ValueError.
    """
    if hosts is not None and hostfile is not None:
        raise UsageError("hosts and hostfile both say where to run: give one of them")
    if use_gloo and use_mpi:
        raise UsageError("use_gloo=True and use_mpi=True: give one of them")
    options = {
        "min_num_proc": min_num_proc,
        "max_num_proc": max_num_proc,
        "slots": slots,
        "reset_limit": reset_limit,
        "cooldown_range": cooldown_range,
        "host_discovery_script": host_discovery_script,
        "min_np": min_np,
        "max_np": max_np,
        "mpi_args": mpi_args,
        "use_mpi": use_mpi or None,
        "output_filename": output_filename,
    }
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"{name}={value!r}: {REFUSED[name]}; leave it out ({INSTEAD})")
    if executable not in (None, sys.executable):
        raise UsageError(f"executable={executable!r}: the ranks run by {sys.executable}, as this process does")
    if np is not None:
        warnings.warn("np is deprecated, use num_proc", DeprecationWarning, stacklevel=2)
        num_proc = np
    _check_hosts(_host_slots(hosts, hostfile), num_proc)
    payload = choose_pickler(func).dumps((func, tuple(args), dict(kwargs or {})))
    return [pickle.loads(result) for result in spawn_without_main(_call, num_proc, (payload,))]


def _call(payload: bytes) -> bytes:
    """Run the function on a rank; pickle its result here, since only cloudpickle can pickle some classes."""
    if FOLDER in sys.path:
        install()  # as in the caller, before what func needs is imported
    func, args, kwargs = pickle.loads(payload)
    return bytes(choose_pickler(func).dumps(func(*args, **kwargs)))


def _host_slots(hosts: str | None, hostfile: str | None) -> list[tuple[str, int]]:
    """Return each host and its slots, from "a:2,b:4" or from lines like "a slots=2"."""
    if hosts is not None:
        texts, mark = hosts.split(","), ":"
    elif hostfile is not None:
        lines = (line.partition("#")[0].strip() for line in Path(hostfile).read_text().splitlines())
        texts, mark = [line for line in lines if line], "slots="
    else:
        return []
    found = []
    for text in texts:
        host, _, slots = text.rpartition(mark)
        if not (host.strip() and slots.strip().isdigit()):
            example = "localhost:2" if hostfile is None else "localhost slots=2"
            raise UsageError(f"{text!r} in {hostfile or 'hosts'}: expected a host and its slots, as in {example!r}")
        found.append((host.strip(), int(slots)))
    return found


def _check_hosts(host_slots: Sequence[tuple[str, int]], num_proc: int) -> None:
    if not host_slots:
        return
    name = socket.gethostname()
    own = {"localhost", "127.0.0.1", "::1", name, name.split(".")[0]}
    for host, _ in host_slots:
        if host not in own:
            raise UsageError(f"hosts: {host!r} is not this host ({name}), and run() starts ranks here only; {INSTEAD}")
    slots = sum(slots for _, slots in host_slots)
    if slots < num_proc:
        raise UsageError(f"hosts: {slots} slots are too few for num_proc={num_proc}")
