"""Two hosts on this machine: network namespaces with their host names and addresses, and an ssh server in each.

Both have two networks. eth0 connects them; each one's eth1 is in a network without the other. Outside a directory only
/etc/netns is written, from which `ip netns exec` takes a namespace's /etc/hosts.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness.jobs import Job

PROGRAMS = ("ip", "tc", "sshd", "ssh-keygen", "unshare")
# tc-tbf(8): limits a link's rate, and drops packets after a latency.
SLOW = ("tbf", "rate", "256kbit", "burst", "4kb", "latency", "200ms")
PACKAGES = "iproute2 openssh-server"
NAMES = ("hosta", "hostb")
ADDRESSES = ("10.231.78.1", "10.231.78.2")
APART = ("10.231.79.1", "10.231.80.2")
ETC = Path("/etc/netns")
START_S = 20.0
POLL_S = 0.05
SSHD_OPTIONS = {
    "StrictModes": "no",
    "UsePAM": "no",
    "PermitRootLogin": "yes",
    "MaxStartups": "100",
    "PasswordAuthentication": "no",
}
SSH_CONFIG = """\
IdentityFile {key}
IdentitiesOnly yes
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


@dataclass(frozen=True)
class Network:
    """Names and addresses of two hosts; those in `apart` are of networks without the other host."""

    names: Sequence[str] = NAMES
    addresses: Sequence[str] = ADDRESSES
    apart: Sequence[str] = APART
    prefix: str = "24"


IPV4 = Network()
HAS_IPV6 = Path("/proc/net/if_inet6").exists()
# Hosts without IPv4, but for loopback.
IPV6 = Network(("hostc", "hostd"), ("fd31:78::1", "fd31:78::2"), ("fd31:79::1", "fd31:80::2"), "64")


@dataclass(frozen=True)
class Hosts:
    """Running hosts; `env` is what a command on one of them needs in addition to the base environment."""

    spaces: Sequence[str]
    env: Mapping[str, str] = field(repr=False)
    network: Network = IPV4

    def on(self, host: int, *argv: str) -> list[str]:
        """Return the argv that runs `argv` on a host."""
        return _on(self.spaces[host], self.network.names[host], *argv)

    def processes(self, *words: str) -> list[str]:
        """Return the command lines on all hosts that contain all these words."""
        found = []
        for space in self.spaces:
            pids = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=True)
            for pid in pids.stdout.split():
                try:
                    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue
                if all(word in line for word in words):
                    found.append(f"{space} {pid} {line}")
        return found

    def ip(self, space: str, *words: str) -> None:
        """Run `ip` in a namespace."""
        _ip("-n", space, *words)

    def cut_off(self, host: int) -> None:
        """Disconnect the host."""
        _ip("-n", self.spaces[host], "link", "set", "eth0", "down")

    def connect(self, host: int) -> None:
        """Reconnect the host; see await_ssh()."""
        _ip("-n", self.spaces[host], "link", "set", "eth0", "up")

    def await_ssh(self, host: int, limit_s: float = 15.0) -> None:
        """Wait until the host's ssh server answers the other host: the kernel caches unreachable neighbours."""
        name, address = self.network.names[host], self.network.addresses[host]
        argv = ["ip", "netns", "exec", self.spaces[1 - host], "bash", "-c", f"exec 3<>/dev/tcp/{address}/22"]
        deadline = time.monotonic() + limit_s
        while (tried := subprocess.run(argv, capture_output=True, text=True, check=False)).returncode:
            assert time.monotonic() < deadline, f"{name} does not answer after {limit_s:g} s: {tried.stderr}"
            time.sleep(0.1)

    @contextmanager
    def slowed(self, host: int) -> Iterator[None]:
        """Limit the host's outgoing traffic, with losses and latency, for the block."""
        link = ("-n", self.spaces[host], "qdisc")
        subprocess.run(["tc", *link, "add", "dev", "eth0", "root", *SLOW], check=True, capture_output=True)
        try:
            yield
        finally:
            subprocess.run(["tc", *link, "del", "dev", "eth0", "root"], check=True, capture_output=True)


def missing(path: str) -> list[str]:
    """Return the needed programs that are not on `path`."""
    return [program for program in PROGRAMS if shutil.which(program, path=path) is None]


@contextmanager
def two_hosts(directory: Path, base_env: Mapping[str, str], network: Network = IPV4) -> Iterator[Hosts]:
    """Yield running hosts, and remove them after the block."""
    spaces = [f"dd{os.getpid()}{name}" for name in network.names]
    key, authorized = directory / "key", directory / "authorized"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    authorized.write_bytes(key.with_suffix(".pub").read_bytes())
    env = {**base_env, "PATH": f"{_ssh(directory, key)}:{base_env['PATH']}"}
    Path("/run/sshd").mkdir(exist_ok=True)
    with ExitStack() as stack:
        for space in spaces:
            _ip("netns", "add", space)
            stack.callback(_gone, space)
        _cable(spaces, network)
        sshd = shutil.which("sshd", path=base_env["PATH"])
        assert sshd is not None
        options = {**SSHD_OPTIONS, "AuthorizedKeysFile": str(authorized), "PidFile": "none"}
        words = ["-D", "-e", "-f", "/dev/null", "-h", str(key), *(f"-o{name}={to}" for name, to in options.items())]
        for space, name in zip(spaces, network.names, strict=True):
            daemon = stack.enter_context(Job(_on(space, name, sshd, *words), env=env, cwd=directory, grace_s=0))
            _wait_for_ssh(space, name, env, daemon)
        yield Hosts(spaces, env, network)


def _ssh(directory: Path, key: Path) -> Path:
    """Return a folder with an `ssh` that uses the key of these hosts, for PATH."""
    config, folder = directory / "ssh_config", directory / "bin"
    folder.mkdir()
    config.write_text(SSH_CONFIG.format(key=key))
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
    (folder / "ssh").chmod(0o755)
    return folder


def _cable(spaces: Sequence[str], network: Network) -> None:
    pair = [f"{space}v"[-15:] for space in spaces]
    _ip("link", "add", pair[0], "netns", spaces[0], "type", "veth", "peer", "name", pair[1], "netns", spaces[1])
    lines = "".join(f"{address} {name}\n" for name, address in zip(network.names, network.addresses, strict=True))
    for space, link, address, apart in zip(spaces, pair, network.addresses, network.apart, strict=True):
        _ip("-n", space, "link", "set", link, "name", "eth0")
        _ip("-n", space, "link", "add", "eth1", "type", "veth", "peer", "name", "eth1end")
        for interface, at in (("eth0", address), ("eth1", apart)):
            # Without nodad an address of IPv6 would be usable only after the kernel has looked for another owner.
            unique = ["nodad"] if ":" in at else []
            _ip("-n", space, "addr", "add", f"{at}/{network.prefix}", "dev", interface, *unique)
        for interface in ("lo", "eth0", "eth1", "eth1end"):
            _ip("-n", space, "link", "set", interface, "up")
        (ETC / space).mkdir(parents=True)
        (ETC / space / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{lines}")


def _gone(space: str) -> None:
    subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
    shutil.rmtree(ETC / space, ignore_errors=True)
    if ETC.exists() and not any(ETC.iterdir()):
        ETC.rmdir()


def _on(space: str, name: str, *argv: str) -> list[str]:
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name, *argv]
    return ["ip", "netns", "exec", space, *named]


def _wait_for_ssh(space: str, name: str, env: Mapping[str, str], daemon: Job) -> None:
    deadline = time.monotonic() + START_S
    argv = _on(space, name, "ssh", name, "true")
    while subprocess.run(argv, env=dict(env), capture_output=True, check=False).returncode != 0:
        assert daemon.is_running(), daemon.output()
        assert time.monotonic() < deadline, f"no ssh server in {space}: {daemon.output()}"
        time.sleep(POLL_S)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
