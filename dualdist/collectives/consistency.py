"""check_consistency: fingerprints of tensors, and the comparison of all ranks' bits.

The arguments and shapes of collectives are compared elsewhere, before data moves: negotiation.py.

Note [fingerprint]: it is computed where the tensor lies, so that a model on a GPU need not be copied. Each chunk of
32-bit words becomes the sum of the words times as many random numbers, modulo 2**64 (multilinear hashing; Lemire and
Kaser, "Strongly universal string hashing is fast", The Computer Journal 57, 2014): two chunks that differ have the same
sum with a probability of at most 2**-32. That protects against accidents, not against an attacker.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from dualdist.backends.base import Backend
from dualdist.backends.control_plane import as_bytes, check_same_tensors, exchange, gather_unless_equal
from dualdist.backends.operation import Stages
from dualdist.collectives.broadcast_state import named_optimizer_params
from dualdist.collectives.collectives import run_agreed
from dualdist.collectives.group import Group
from dualdist.collectives.refusals import refused_alike
from dualdist.collectives.tensor_utils import check_tensor, named_pairs, plain_values, remember_names, spec
from dualdist.errors import DriftError, UsageError
from dualdist.utils.suggest import format_ranks, ranks_by_value, type_name

NamedTensors = Sequence[tuple[str, torch.Tensor]]
Options = Mapping[str, str]  # by name, as text
Difference = tuple[int, float, str]  # elements that differ, the largest finite distance, and what is not finite
WORD_BYTES = 4
CHUNK_WORDS = 1 << 16  # with their products they fit a processor's L2 cache
# Chunks at a time: on a GPU a call costs more than its work.
CHUNKS_ON_CPU, CHUNKS_ELSEWHERE = 1, 64
DIGEST_BYTES = 16


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of all bits of the tensors, in this order."""
    return hashlib.sha256(b"".join(fingerprints(list(tensors)))).hexdigest()


@torch.no_grad()
def fingerprints(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Return DIGEST_BYTES per tensor, the same for the same bits on any device; wait once per device."""
    found: list[bytes] = [b""] * len(tensors)
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        numbers = [number for number, tensor in enumerate(tensors) if tensor.device == device]
        rows = CHUNKS_ON_CPU if device.type == "cpu" else CHUNKS_ELSEWHERE
        products = torch.empty(rows, CHUNK_WORDS, dtype=torch.int64, device=device)
        sums = [_chunk_sums(plain_values(tensors[number]).contiguous(), products) for number in numbers]
        data, begin = torch.cat(sums).cpu().numpy().tobytes(), 0
        for number, chunks in zip(numbers, sums, strict=True):
            end = begin + chunks.nbytes
            # With the length, since zeros at the end add nothing to a sum.
            hashed = hashlib.sha256(tensors[number].nbytes.to_bytes(8, "little") + data[begin:end])
            found[number], begin = hashed.digest()[:DIGEST_BYTES], end
    return found


def _chunk_sums(tensor: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """Return one number per chunk of a contiguous tensor; `products` is memory for some chunks at a time."""
    words, factors = _words(as_bytes(tensor)), _factors(products.device)
    if (count := words.numel()) <= CHUNK_WORDS:  # a small parameter, of which a model may have thousands
        return torch.mul(words, factors[:count], out=products[0, :count]).sum(0, keepdim=True)
    whole = count // CHUNK_WORDS
    chunks, rest = words[: whole * CHUNK_WORDS].view(whole, CHUNK_WORDS), words[whole * CHUNK_WORDS :]
    pieces = [*chunks.split(len(products))]
    if rest.numel():
        pieces.append(rest.view(1, -1))
    return torch.cat(
        [
            torch.mul(each, factors[: each.shape[1]], out=products[: each.shape[0], : each.shape[1]]).sum(1)
            for each in pieces
        ]
    )


def _words(data: torch.Tensor) -> torch.Tensor:
    """Return bytes as 32-bit words; they are copied if they are not aligned."""
    missing = -data.numel() % WORD_BYTES
    if missing or data.storage_offset() % WORD_BYTES:
        data = torch.cat([data, data.new_zeros(missing)])
    return data.view(torch.int32)


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return the random numbers, which are the same on all ranks and with all versions of torch."""
    stream = hashlib.shake_256(b"dualdist").digest(8 * CHUNK_WORDS)
    return torch.frombuffer(bytearray(stream), dtype=torch.int64).to(device)


def check_consistency(
    group: Group, given: Any, optimizer: torch.optim.Optimizer | None, *, has_all_state: bool, buffers: bool
) -> None:
    """Raise DriftError on every rank if bits or options differ; MismatchError if names, shapes or dtypes do."""
    name = group.next_name("check_consistency")
    options: Options = {}
    with refused_alike(group, "check_consistency", name):
        tensors = _named_tensors(given, buffers=buffers)
        remember_names(tensors)
        if optimizer is not None:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise UsageError(f"check_consistency takes a torch optimizer, not {type_name(optimizer)}")
            options = options_of(optimizer, has_all_state=has_all_state)
            tensors = [*tensors, *(named_state(optimizer) if has_all_state else ())]
        for each, tensor in tensors:
            check_tensor(tensor, each)
    require_same(group, tensors, name, options)


def require_same(group: Group, tensors: NamedTensors, name: str, options: Options, when: str = "") -> None:
    """Raise DriftError on every rank if the ranks hold different bits; all ranks call this with the same name."""
    found = run_agreed(
        group, "check_consistency", name, {}, lambda backend: difference(backend, tensors, name, options)
    )
    if found:
        raise DriftError(
            f"{when}{found}. The ranks started from different values, which dd.broadcast_parameters(model) and "
            "dd.broadcast_optimizer_state(optimizer) prevent, or one has changed something on its own since"
        )


def options_of(optimizer: torch.optim.Optimizer, *, has_all_state: bool) -> Options:
    """Return what must be the same on all ranks as text: the class, plain options of groups, and the steps taken.

    `has_all_state` is False where this rank has a part of the optimizer's state.
    """
    found = {"the optimizer's class": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            found[f"{key} of parameter group {number}"] = _plain_text(value)
    states = optimizer.state.values() if has_all_state else ()
    steps = (state["step"] for state in states if isinstance(state, dict) and "step" in state)
    found["the number of steps"] = _plain_text(next(steps, None))
    return {name: text for name, text in found.items() if text}


def _plain_text(value: object) -> str:
    """Return a number, a string or a tuple as text; "" for anything else."""
    plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    return f"{plain}" if isinstance(plain, (int, float, str, tuple)) else ""


def named_state(optimizer: torch.optim.Optimizer) -> NamedTensors:
    """Return the tensors of the parameters' state, sorted by name."""
    states = [(name, optimizer.state.get(param, {})) for name, param in named_optimizer_params(optimizer)]
    found = [
        (f"{key} of {name}", value)
        for name, state in states
        for key, value in (state.items() if isinstance(state, dict) else ())
        if isinstance(value, torch.Tensor) and key != "step"
    ]
    return sorted(found, key=itemgetter(0))


def differing_options(found: Sequence[Options], ranks: Sequence[int]) -> str:
    """Return the first option that differs, with its values by rank; "" if all are the same."""
    for name in dict.fromkeys(itertools.chain(*found)):
        values = ranks_by_value([options.get(name, "missing") for options in found], ranks)
        if len(values) > 1:
            return f"{name} is " + ", ".join(f"{value} on {format_ranks(some)}" for value, some in values.items())
    return ""


def difference(backend: Backend, tensors: NamedTensors, name: str, options: Options) -> Stages[str]:
    """Return how the ranks' tensors or options differ, as text, the same on every rank; "" if they are equal."""
    prints = fingerprints([tensor for _, tensor in tensors])
    specs = "\n".join(f"{name} {spec(tensor.dtype, tensor.shape)}" for name, tensor in tensors)
    found = yield from gather_unless_equal(backend, (options, specs, hashlib.sha256(b"".join(prints)).digest()), name)
    if not found:
        return ""
    if clause := differing_options([each for each, _, _ in found], backend.ranks):
        return clause
    yield from check_same_tensors(backend, tensors, 0, f"{name}.tensors")
    rows = yield exchange(backend, b"".join(prints), f"{name}.prints")
    by_tensor = [[row[start : start + DIGEST_BYTES] for row in rows] for start in range(0, len(rows[0]), DIGEST_BYTES)]
    differing = [number for number, ranks_prints in enumerate(by_tensor) if len(set(ranks_prints)) > 1]
    if not differing:  # the ranks have the same options in another order
        return ""
    (tensor_name, tensor), ranks_prints = tensors[differing[0]], by_tensor[differing[0]]
    reference = _most_common(ranks_prints)
    differences = yield from _compare_with(backend, tensor, reference, name)
    how = _describe(backend.ranks, ranks_prints, reference, differences)
    count = f"{len(differing)} of {len(tensors)} tensors differ between the ranks"
    return f"{count}, the first is {tensor_name} {spec(tensor.dtype, tensor.shape)}: {how}"


def _most_common(prints: Sequence[bytes]) -> int:
    """Return the first rank that holds what most ranks hold."""
    return max(range(len(prints)), key=lambda rank: (prints.count(prints[rank]), -rank))


def _compare_with(backend: Backend, tensor: torch.Tensor, root: int, name: str) -> Stages[list[Difference]]:
    """Return each rank's difference from root's tensor; elements are compared by their bits, since NaN != NaN."""
    values = plain_values(tensor).contiguous()
    reference = values.clone()
    yield backend.broadcast_(as_bytes(reference), root, f"{name}.first")
    rows = [as_bytes(each).view(each.numel(), -1) for each in (values, reference)]
    elements = int((rows[0] != rows[1]).any(1).sum())
    wide = torch.complex128 if values.is_complex() else torch.float64
    distances = (values.to(wide) - reference.to(wide)).abs().view(-1)
    distances = distances[distances.isfinite()]
    own = elements, float(distances.max()) if len(distances) else 0.0, _nonfinite(values)
    rows_of_ranks = yield exchange(backend, json.dumps(own).encode(), f"{name}.distances")
    return [json.loads(row) for row in rows_of_ranks]


def _nonfinite(tensor: torch.Tensor) -> str:
    """Return a clause that counts NaN and infinite elements, "" if there are none."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return ""
    wide = tensor if tensor.dtype.itemsize > 1 else tensor.float()
    counts = (int(wide.isnan().sum()), "NaN"), (int(wide.isinf().sum()), "infinite")
    kinds = [f"{count} {word}" for count, word in counts if count]
    return f", holding {' and '.join(kinds)}" if kinds else ""


def _describe(ranks: Sequence[int], prints: Sequence[bytes], reference: int, differences: Sequence[Difference]) -> str:
    """Return which ranks differ from those that agree with the reference, and by how much."""
    by_print = ranks_by_value(prints, ranks)
    agree = by_print.pop(prints[reference])
    clauses = []
    for members in by_print.values():
        elements, most, nonfinite = differences[ranks.index(members[0])]
        verb = "differs" if len(members) == 1 else "differ"
        clauses.append(
            f"{format_ranks(members)} {verb} from {format_ranks(agree)} in {elements} elements, by {most:.3g} at most"
            f"{nonfinite}"
        )
    if in_reference := differences[reference][2]:
        clauses.append(f"{format_ranks(agree)}{in_reference.removeprefix(',')}")
    return "; ".join(clauses)


def _named_tensors(given: Any, *, buffers: bool) -> NamedTensors:
    """Return the tensors of a module, a state_dict or named tensors, in their order."""
    if isinstance(given, torch.nn.Module):
        given = [*given.named_parameters(), *(given.named_buffers() if buffers else ())]
    return [(name, tensor) for name, tensor in named_pairs(given, "check_consistency") if tensor is not None]
