"""Client of horovodrun's elastic driver, which keeps the ranks that are left, starts others, and renumbers all."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dualdist.environments.horovodrun import ELASTIC, RANK_VARIABLES, STORE_ADDRESS, STORE_PORT
from dualdist.errors import RendezvousError
from dualdist.utils.horovod_names import real_horovod

HOSTNAME = "HOROVOD_HOSTNAME"
LOCAL_RANK = "HOROVOD_LOCAL_RANK"
INTERFACE = "HOROVOD_GLOO_IFACE"
# The order of the numbers in the driver's answer.
FIELDS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


class RemovedError(SystemExit):
    """Raised if the driver has no slot for this rank: the program exits with status 0, and the others continue."""

    def __init__(self, message: str) -> None:
        super().__init__(0)
        self.message = message

    def __str__(self) -> str:
        return self.message


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Return True if horovodrun's elastic driver started this rank, which may continue when another one is lost."""
    return environ.get(ELASTIC) == "1" and bool(environ.get(STORE_ADDRESS))


def next_slot(environ: Mapping[str, str], timeout_s: float) -> dict[str, str]:
    """Return the variables of this rank's slot in the next generation; every remaining rank calls this once.

    Raises:
        RemovedError: the driver has no slot for this rank.
        RendezvousError: the driver does not answer.
    """
    import http.client  # needed by elastic ranks alone, and a quarter of the time of `import dualdist`

    address, port = environ[STORE_ADDRESS], int(environ[STORE_PORT])
    slot = f"{environ[HOSTNAME]}:{environ[LOCAL_RANK]}"
    connection = http.client.HTTPConnection(address, port, timeout=timeout_s)
    try:
        # One request only: the driver would count a second one as another rank.
        connection.request("GET", f"/rank_and_size/{slot}")
        numbers = connection.getresponse().read().decode().split(",")
        found = {f"HOROVOD_{name}": str(int(number)) for name, number in zip(FIELDS, numbers, strict=True)}
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise RendezvousError(
            f"horovodrun's driver at {address}:{port} assigned no slot to {slot} within {timeout_s:g} s "
            f"({error or type(error).__name__}): too few hosts are left, or horovodrun has ended"
        ) from error
    finally:
        connection.close()
    if int(found["HOROVOD_RANK"]) < 0:
        raise RemovedError(f"horovodrun's driver has no slot for {slot} any more")
    assert set(found) == set(RANK_VARIABLES)
    return found


@real_horovod()
def watch_hosts(environ: Mapping[str, str], changed: Callable[[float, int], None]) -> Callable[[], None]:
    """Call changed(timestamp, how) in a thread when hosts come or go; return a function that ends this.

    The driver tells the first rank alone.
    """
    from horovod.runner.common.util import secret
    from horovod.runner.elastic.rendezvous import PUT_WORKER_ADDRESSES
    from horovod.runner.elastic.worker import WorkerNotificationService
    from horovod.runner.http.http_client import put_data_into_kvstore

    class Manager:
        def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
            changed(timestamp, update_res)

    key = secret.make_secret_key()
    service = WorkerNotificationService(key, environ.get(INTERFACE), Manager())
    service._thread.name = "dualdist-hosts"  # a daemon thread of ours, not of the program
    slot = f"{environ[HOSTNAME]}:{environ[LOCAL_RANK]}"
    put_data_into_kvstore(
        environ[STORE_ADDRESS], int(environ[STORE_PORT]), PUT_WORKER_ADDRESSES, slot, (service.addresses(), key)
    )
    end: Callable[[], None] = service.shutdown
    return end
