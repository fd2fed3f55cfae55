"""Launchers among the programs of `dualdist exec`, where each rank would start a job of its own."""

import re
from collections.abc import Mapping, Sequence
from itertools import dropwhile
from pathlib import PurePath

from dualdist.errors import UsageError
from dualdist.topology import Topology

# Programs that start ranks, and the sub-command by which they do, or "".
PROGRAMS = {
    **dict.fromkeys(("torchrun", "accelerate-launch", "deepspeed", "horovodrun", "mpirun", "mpiexec", "srun"), ""),
    **dict.fromkeys(("dualdist", "fabric", "lightning", "torchx"), "run"),
    "accelerate": "launch",
}
# The same as modules.
MODULES = {
    **dict.fromkeys(("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"), ""),
    **dict.fromkeys(("deepspeed.launcher.runner", "horovod.runner.launch"), ""),
    **dict.fromkeys(("dualdist", "lightning.fabric.cli", "lightning_fabric.cli"), "run"),
}
PYTHON = re.compile(r"python[0-9.]*")
SHELLS = ("sh", "bash")
SHELL_COMMAND = re.compile("-[a-z]*c")  # sh -c, bash -lc
SEPARATORS = re.compile(r"[;&|()'\"\n]+")  # between the commands of a shell


def refuse_launcher(words: Sequence[str], topology: Topology, *, is_module: bool) -> None:
    """Raise UsageError if the program of one of several ranks is a launcher."""
    found = find_launcher(words, is_module=is_module) if topology.size > 1 else ""
    if found:
        raise UsageError(
            f"{found} starts ranks itself, and this is rank {topology.rank} of {topology.size}, started by "
            f"{topology.launcher}. Leave out {found}, as in `... dualdist exec train.py`, so that each rank runs the "
            f"program; or leave out dualdist exec, where {found} is to start the ranks of each host"
        )


def find_launcher(words: Sequence[str], *, is_module: bool = False) -> str:
    """Return the name of the launcher that the words after `dualdist exec` start, or ""."""
    if is_module:
        return _find(MODULES, words)
    if words[0] != "--":
        return _find(PROGRAMS, words)
    command = list(dropwhile(_is_before_program, words[1:]))
    if command and PurePath(command[0]).name in SHELLS and SHELL_COMMAND.fullmatch("".join(command[1:2])):
        typed = (part.split() for part in SEPARATORS.split(" ".join(command[2:])))
        return next(filter(None, map(_find_in_command, typed)), "")
    return _find_in_command(command)


def _find_in_command(words: Sequence[str]) -> str:
    """Return the launcher that a command starts, or ""."""
    command = list(dropwhile(_is_before_program, words))
    return _find(MODULES, command[1:]) if command[:1] == ["-m"] else _find(PROGRAMS, command)


def _is_before_program(word: str) -> bool:
    """Return True for env, its assignments, python and its options, which stand before a program's name."""
    is_option = word.startswith("-") and word != "-m"
    return is_option or word in ("env", "exec") or "=" in word or bool(PYTHON.fullmatch(PurePath(word).name))


def _find(known: Mapping[str, str], words: Sequence[str]) -> str:
    """Return the first word as the user knows it if it starts ranks."""
    name = PurePath(words[0]).name if words else ""
    needed = known.get(name)
    if needed is None or (needed and needed not in words[1:2]):
        return ""
    return f"{name} {needed}".strip()
