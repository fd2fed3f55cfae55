"""Job scripts as tests have them written, and what stands in for schedulers of which no server is here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.jobs import Launch
from launch.running import RUN

AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def written(launch: Launch, *options: str, program: Sequence[str]) -> Path:
    """The file that the command line wrote."""
    path = launch.directory / "job.sh"
    launch([*RUN, *options, "--write", str(path), *program])
    return path


# Neither PBS nor LSF has a server here. These do what the manuals say that pbsdsh and jsrun do, on this one host:
# pbsdsh's tasks get a host name of their own, by which dualdist takes them for other hosts, and none of our variables.
PBSDSH = """#!/bin/sh
# pbsdsh -n INDEX -- PROGRAM ARGUMENT...
index=$2; shift 3
exec env -i PATH=/usr/bin:/bin PBS_JOBID="$PBS_JOBID" PBS_NODENUM="$index" HOSTS="${0%pbsdsh}hosts" \\
    unshare --uts --mount sh -c 'mount --bind "$HOSTS" /etc/hosts; hostname "node$PBS_NODENUM"; exec "$@"' sh "$@"
"""

JSRUN = """#!/bin/sh
# jsrun --nrs N --rs_per_host N ... --bind B PROGRAM ARGUMENT...
sets=$2; host=$4; shift 12
rank=0
while [ $rank -lt $sets ]; do
    JSM_NAMESPACE_RANK=$rank JSM_NAMESPACE_SIZE=$sets JSM_NAMESPACE_LOCAL_RANK=$((rank % host)) \\
        JSM_NAMESPACE_LOCAL_SIZE=$host "$@" &
    rank=$((rank + 1))
done
wait
"""


def stand_in(launch: Launch, name: str, text: str) -> dict[str, str]:
    """A PATH on which the program comes first."""
    folder = launch.directory / "bin"
    folder.mkdir()
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{launch.env['PATH']}"}


# The second network of each host leads nowhere.
AWAY = {"OMPI_MCA_oob_tcp_if_include": "eth0", "OMPI_MCA_btl_tcp_if_include": "eth0", "HOROVOD_GLOO_IFACE": "eth0"}
