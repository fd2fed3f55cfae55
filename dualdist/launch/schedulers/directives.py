"""Directives: lines that a person adds to a job script for the scheduler; none may set what an option of ours sets."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dualdist.errors import UsageError
from dualdist.launch.option import options_of
from dualdist.launch.script_request import EXCLUSIVE_RESOURCES, Resources, ScriptRequest

GPU, PLACE = "GPUs", "-l place"
# Options that every script has a line for, given or not.
ALWAYS = ("nodes", "tasks_per_node", "cpus_per_task", "job_name")


@dataclass(frozen=True)
class DirectiveSyntax:
    """The directives of a scheduler.

    Attributes:
        prefix: begins each line of the script that is one.
        settings: returns what an option sets, given its word, which begins with a dash, and the word after it.
        owners: the option of ours that sets the same, by setting.
        gpus: a pattern of directives that request GPUs of a node, with their number as its last group.
    """

    prefix: str
    settings: Callable[[str, str], list[str]]
    owners: Mapping[str, str]
    gpus: str


def _by_setting(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the option by setting, of the settings by option, which commas separate."""
    return {setting: name for name, listed in settings.items() for setting in listed.split(", ")}


def _slurm_settings(word: str, following: str) -> list[str]:
    name, equals, value = word.partition("=")
    if name == "--gres":
        kinds = {entry.partition(":")[0] for entry in (value if equals else following).split(",")}
        return [GPU] if "gpu" in kinds else []
    return [name if word.startswith("--") else word[:2]]


def _pbs_settings(word: str, following: str) -> list[str]:
    if word[:2] != "-l":
        return [word[:2]]
    return [f"-l {each.partition('=')[0]}" for each in (word[2:] or following).split(",")]


def _lsf_settings(word: str, following: str) -> list[str]:
    flag = re.match("-[a-zA-Z]*", word)
    assert flag is not None
    sections = re.findall(r"\b(?:span|affinity)(?=\[)|\bmem(?==)", following)
    return [f"-R {section}" for section in sections] if flag[0] == "-R" else [flag[0]]


SYNTAX = {
    "slurm": DirectiveSyntax(
        "#SBATCH",
        _slurm_settings,
        _by_setting(
            {
                "nodes": "-N, --nodes",
                "tasks_per_node": "-n, --ntasks, --ntasks-per-node, --tasks-per-node, --ntasks-per-gpu",
                "cpus_per_task": "-c, --cpus-per-task",
                "gpus_per_node": f"{GPU}, -G, --gpus, --gpus-per-node, --gpus-per-task",
                "memory": "--mem, --mem-per-cpu, --mem-per-gpu",
                "time": "-t, --time",
                "queue": "-p, --partition",
                "account": "-A, --account",
                "job_name": "-J, --job-name",
                "requeue": "--requeue, --no-requeue, --signal, --open-mode",
            }
        ),
        r"--gres[= ](?:\S*,)?gpu(?::[^:,\s]+)?:([0-9]+)(?![^,\s])|--gpus-per-node[= ](?:[^:,\s]+:)?([0-9]+)$",
    ),
    "pbs": DirectiveSyntax(
        "#PBS",
        _pbs_settings,
        _by_setting(
            {
                "nodes": "-l select, -l nodes, -l nodect",
                "tasks_per_node": "-l mpiprocs, -l ppn, -l procs",
                "cpus_per_task": "-l ncpus",
                "gpus_per_node": "-l ngpus, -l gpus",
                "memory": "-l mem",
                "time": "-l walltime",
                "queue": "-q",
                "account": "-A",
                "job_name": "-N",
                "requeue": "-r",
                "env": "-v",
            }
        ),
        "(?!)",  # only within select
    ),
    "lsf": DirectiveSyntax(
        "#BSUB",
        _lsf_settings,
        _by_setting(
            {
                "nodes": "-nnodes, -n",
                "tasks_per_node": "-R span",
                "cpus_per_task": "-R affinity",
                "gpus_per_node": "-gpu",
                "memory": "-R mem",
                "time": "-W",
                "queue": "-q",
                "account": "-P",
                "job_name": "-J",
                "requeue": "-r, -rn, -Q, -wa, -wt",
            }
        ),
        r"-gpu\s.*\bnum=([0-9]+)",
    ),
}


def directive_lines(scheduler: str, request: ScriptRequest) -> list[str]:
    """Return the script's lines of the directives; UsageError for one that contradicts the request."""
    if request.directives and scheduler not in SYNTAX:
        raise UsageError(
            f"--directive {request.directives[0]!r} with the scheduler {scheduler}: only {', '.join(SYNTAX)} scripts "
            "have directives; leave it out"
        )
    for directive in request.directives:
        for message in _refusals(scheduler, directive, request):
            raise UsageError(message)
    return [f"{SYNTAX[scheduler].prefix} {directive}" for directive in request.directives]


def requested_gpus(scheduler: str, directives: Sequence[str]) -> int:
    """Return how many GPUs of a node the directives request."""
    found = (re.search(SYNTAX[scheduler].gpus, each) for each in directives if scheduler in SYNTAX)
    return sum(int(each[each.lastindex or 0]) for each in found if each is not None)


def requests_gpus(scheduler: str, directives: Sequence[str]) -> bool:
    """Return True if a directive requests GPUs, of whatever number."""
    for directive in directives if scheduler in SYNTAX else ():
        words = directive.split()
        for word, following in zip(words, [*words[1:], ""], strict=False):
            settings = SYNTAX[scheduler].settings(word, following) if word.startswith("-") else ()
            if any(_owner(SYNTAX[scheduler], each) == "gpus_per_node" for each in settings):
                return True
    return False


def _refusals(scheduler: str, directive: str, request: ScriptRequest) -> Iterator[str]:
    syntax = SYNTAX[scheduler]
    shown = f"--directive {directive!r}"
    if not directive.startswith("-") or not directive.isprintable():
        yield f"{shown}: expected one line of what follows {syntax.prefix} in a script, which begins with a dash"
        return
    try:
        words = shlex.split(directive)
    except ValueError as error:
        yield f"{shown}: its quotes do not match ({error})"
        return
    for word, following in zip(words, [*words[1:], ""], strict=True):
        for setting in syntax.settings(word, following) if word.startswith("-") else ():
            if setting == PLACE and "scatter" not in directive:
                yield f"{shown}: the ranks of each chunk need a node of their own; expected scatter, as in scatter:excl"
            owner = _owner(syntax, setting)
            if owner in ALWAYS:
                yield f"{shown}: the option {_flag(owner)} of dualdist run sets that: use it instead"
            elif owner is not None and (given := _given(request, owner)):
                yield f"{shown}: {given} sets that, too: leave one of them out"


def _owner(syntax: DirectiveSyntax, setting: str) -> str | None:
    """Return the option of ours that sets the same; long options may be shortened."""
    if setting in syntax.owners or not setting.startswith("--"):
        return syntax.owners.get(setting)
    return next((owner for each, owner in syntax.owners.items() if each.startswith(setting)), None)


def _given(request: ScriptRequest, owner: str) -> str:
    """Return the option with its value, or that of its rival, if the request has one, else ""."""
    if owner == "env":
        return f"--env {request.handed_on[0]}" if request.handed_on else ""
    names = next((pair for pair in EXCLUSIVE_RESOURCES if owner in pair), (owner,))
    return next((f"{_flag(name)} {value}" for name in names if (value := getattr(request, name))), "")


def _flag(name: str) -> str:
    return options_of(Resources)[name].flags_of(name)[0]
