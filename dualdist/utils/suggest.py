"""Parts of error messages: valid choices, the closest match, shortened lists of ranks."""

import difflib
import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from dualdist.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])
V = TypeVar("V", bound=Hashable)

SHOWN = 8  # at most so many tensors or ranks are listed in an error
# Names of Horovod and torch.distributed, and those of the same things here.
OUR_NAMES = {
    "DistributedOptimizer": "wrap_optimizer",
    "DistributedSampler": "Sampler",
    "all_gather": "allgather",
    "all_gather_object": "allgather_object",
    "all_reduce": "allreduce",
    "all_to_all": "alltoall",
    "allreduce_async": "allreduce with async_op=True",
    "broadcast_object_list": "broadcast_object",
    "cross_rank": "node_rank",
    "cross_size": "num_nodes",
    "destroy_process_group": "shutdown",
    "get_local_rank": "local_rank",
    "get_rank": "rank",
    "get_world_size": "size",
    "init_process_group": "init",
    "no_sync": "wrap_optimizer with accumulate=",
    "reduce": "allreduce",
    "reduce_scatter": "reducescatter",
    "world_size": "size",
}
# Arguments of Horovod's and torch.distributed's functions, and what stands for them here.
OUR_ARGUMENTS = {
    "average": 'op="mean" or op="sum"',
    "backward_passes_per_step": "accumulate=",
    "dst": "root=",
    "np": "nprocs=",
    "nprocs": "np=",
    "postscale_factor": "postscale=",
    "prescale_factor": "prescale=",
    "process_set": "group=",
    "reduce_op": "op=",
    "root_rank": "root=",
    "src": "root=",
    "timeout": "timeout_s=",
}
# Words of other tools' command lines, or of a part of a thing, and our words for them.
SYNONYMS = {
    **dict.fromkeys(("--nproc-per-node", "--nproc_per_node", "--num-proc", "--nprocs", "--np", "--ntasks"), "-np"),
    **dict.fromkeys(("mpi", "mpiexec", "openmpi", "mpich"), "mpirun"),
    **{"slurm": "srun", "horovod": "horovodrun", "torch": "torchrun", "ddp": "native"},
    **dict.fromkeys(("nccl", "gloo", "shm"), "native"),
    **{"avg": "mean", "average": "mean", "add": "sum", "prod": "product", "maximum": "max", "minimum": "min"},
}


def require_choice(word: str, known: Iterable[str], what: str, where: str = "") -> str:
    """Return the word; raise UsageError, with the choices and the closest one, if it is unknown."""
    words = list(known)
    if word not in words:
        raise UsageError(f"{what} {word!r}: expected one of {', '.join(words)}{where}{did_you_mean(word, words)}")
    return word


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the closest known word, or ""."""
    words, asked = {each.lower(): each for each in known}, str(word).lower()
    longer = [each for each in words if each.startswith(asked)]
    near = longer if len(longer) == 1 else difflib.get_close_matches(asked, words, 1)
    synonym = SYNONYMS.get(asked)
    found = [synonym] if synonym in words else [words[each] for each in near]
    return f"; did you mean {found[0]!r}?" if found else ""


def explain_call(
    function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any], error: TypeError
) -> TypeError:
    """Return an error about the arguments that `function` does not take, with our name for one; else `error`."""
    signature = inspect.signature(function)
    known = signature.parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
    unknown = next((name for name in keywords if name not in known and not takes_any), None)
    if unknown is not None:
        ours = OUR_ARGUMENTS.get(unknown, "")
        hint = f"; pass {ours}" if ours.partition("=")[0] in known else did_you_mean(unknown, known)
        return TypeError(f"{function.__name__}() takes no argument {unknown!r}{hint}")
    try:
        signature.bind(*args, **keywords)
    except TypeError as problem:
        return TypeError(f"{function.__name__}(): {problem}")
    return error


def explain_calls(function: F) -> F:
    """Decorate a function so that arguments which it does not take are an error of explain_call()."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            raise explain_call(function, args, kwargs, error) from error.__cause__

    return call  # type: ignore[return-value]


def type_name(value: object) -> str:
    """Return the name of the value's type after its article, such as "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def format_ranks(ranks: Sequence[int]) -> str:
    """Return e.g. "rank 3" or "ranks 0, 1, 2 and 61 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:SHOWN]))
    return f"ranks {shown}" + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")


def ranks_by_value(values: Sequence[V], ranks: Sequence[int]) -> dict[V, list[int]]:
    """Return for each different value, in the order of the ranks, which ranks have it."""
    found: dict[V, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        found.setdefault(value, []).append(rank)
    return found


def format_by_rank(values: Sequence[object]) -> str:
    """Return e.g. "1 on rank 0, 2 on ranks 1, 2" for the value of each rank."""
    ranks = ranks_by_value([*map(str, values)], range(len(values)))
    shown = [f"{text} on {format_ranks(members)}" for text, members in list(ranks.items())[:SHOWN]]
    return ", ".join(shown) + (f" and {len(ranks) - SHOWN} other values" if len(ranks) > SHOWN else "")
