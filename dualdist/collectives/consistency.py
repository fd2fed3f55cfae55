"""Whether all ranks hold the same bits, and if not, which tensor is the first that differs, on which ranks and how."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dualdist.backends.base import Backend
from dualdist.backends.control_plane import ControlAllgather, as_bytes, check_same_tensors
from dualdist.collectives.collectives import run_agreed
from dualdist.collectives.fingerprint import DIGEST_BYTES, fingerprints
from dualdist.collectives.group import Group
from dualdist.collectives.tensor_utils import spec
from dualdist.errors import DriftError, UnsupportedError, UsageError
from dualdist.utils.suggest import format_ranks

Named = Sequence[tuple[str, torch.Tensor]]


def check_consistency(group: Group, given: Any, *, buffers: bool) -> None:
    """DriftError on every rank unless all hold the same bits; MismatchError where they hold other tensors."""
    tensors = _named(given, buffers=buffers)
    require_same(group, tensors, group.next_name("check_consistency"))


def require_same(group: Group, tensors: Named, name: str, when: str = "") -> None:
    """DriftError on every rank unless all hold the same bits; all of them call this, under the same name."""
    found = run_agreed(group, "check_consistency", name, {}, lambda line: difference(line, tensors, name))
    if found:
        raise DriftError(
            f"{when}{found}. The ranks did not begin alike, which dd.broadcast_parameters(model) sees to, or one has "
            "changed something by itself since"
        )


def difference(line: Backend, tensors: Named, name: str) -> str:
    """What differs between the ranks, in words, the same on every rank; nothing where all is the same."""
    prints = fingerprints([tensor for _, tensor in tensors])
    kinds = "\n".join(f"{own} {spec(tensor.dtype, tensor.shape)}" for own, tensor in tensors)
    mine = hashlib.sha256(kinds.encode()).digest() + hashlib.sha256(b"".join(prints)).digest()
    if len(set(ControlAllgather(line, mine, name).wait())) == 1:
        return ""
    check_same_tensors(line, tensors, 0, f"{name}.tensors")
    said = ControlAllgather(line, b"".join(prints), f"{name}.prints").wait()
    everybodys = [[row[start : start + DIGEST_BYTES] for row in said] for start in range(0, len(said[0]), DIGEST_BYTES)]
    differing = [number for number, theirs in enumerate(everybodys) if len(set(theirs)) > 1]
    (own, tensor), theirs = tensors[differing[0]], everybodys[differing[0]]
    reference = _most_common(theirs)
    how = _in_words(line.ranks, theirs, reference, _distances(line, tensor, reference, name))
    count = f"{len(differing)} of {len(tensors)} tensors differ between the ranks"
    return f"{count}, the first is {own} {spec(tensor.dtype, tensor.shape)}: {how}"


@dataclass(frozen=True)
class TensorDifference:
    """How a rank's tensor differs from another's: in how many elements, and by how much where both are finite."""

    elements: int
    most: float
    nans: int
    infinities: int


def _most_common(prints: Sequence[bytes]) -> int:
    """The first rank that holds what most ranks hold."""
    return max(range(len(prints)), key=lambda place: (prints.count(prints[place]), -place))


def _distances(line: Backend, tensor: torch.Tensor, root: int, name: str) -> list[TensorDifference]:
    """Everybody's distance from what root holds."""
    mine = tensor.detach().resolve_conj().resolve_neg().contiguous()
    theirs = mine.clone()
    if mine.numel():
        line.broadcast_(as_bytes(theirs), root, f"{name}.first").wait()
    said = json.dumps([*_distance(mine, theirs)]).encode()
    return [TensorDifference(*json.loads(text)) for text in ControlAllgather(line, said, f"{name}.distances").wait()]


def _distance(mine: torch.Tensor, theirs: torch.Tensor) -> tuple[int, float, int, int]:
    """By bits, as NaN is not equal to itself."""
    rows = [as_bytes(tensor).view(tensor.numel(), -1) for tensor in (mine, theirs)]
    elements = int((rows[0] != rows[1]).any(1).sum())
    wide = torch.complex128 if mine.is_complex() else torch.float64
    apart = (mine.to(wide) - theirs.to(wide)).abs().view(-1)
    apart = apart[apart.isfinite()]
    nans, infinities = counts_of(mine)
    return elements, float(apart.max()) if len(apart) else 0.0, nans, infinities


def counts_of(tensor: torch.Tensor) -> tuple[int, int]:
    """How many elements are NaN, and how many infinite."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0, 0
    wide = tensor if tensor.dtype.itemsize > 1 else tensor.float()
    return int(wide.isnan().sum()), int(wide.isinf().sum())


def _in_words(ranks: Sequence[int], prints: Sequence[bytes], reference: int, told: Sequence[TensorDifference]) -> str:
    """Which ranks hold something else than those that agree with the reference, and what."""
    agree = [rank for rank, one in zip(ranks, prints, strict=True) if one == prints[reference]]
    groups: dict[bytes, list[int]] = {}
    for place, one in enumerate(prints):
        if one != prints[reference]:
            groups.setdefault(one, []).append(place)
    clauses = []
    for places in groups.values():
        those, far = [ranks[place] for place in places], told[places[0]]
        verb = "differs" if len(those) == 1 else "differ"
        clauses.append(
            f"{format_ranks(those)} {verb} from {format_ranks(agree)} in {far.elements} elements, "
            f"by {far.most:.3g} at most" + _not_finite(far)
        )
    own = _not_finite(told[reference])
    return "; ".join(clauses) + (f"; {format_ranks(agree)}{own.removeprefix(',')}" if own else "")


def _not_finite(found: TensorDifference) -> str:
    kinds = [f"{count} {word}" for count, word in ((found.nans, "NaN"), (found.infinities, "infinite")) if count]
    return f", holding {' and '.join(kinds)}" if kinds else ""


def _named(given: Any, *, buffers: bool) -> Named:
    """The tensors of a module, a state_dict or named tensors, in their order."""
    pairs: list[Any]
    if isinstance(given, torch.nn.Module):
        pairs = [*given.named_parameters(), *(given.named_buffers() if buffers else ())]
    elif isinstance(given, Mapping):
        pairs = list(given.items())
    else:
        pairs = list(given) if isinstance(given, Iterable) else [given]
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise UsageError(
                "check_consistency takes a module, a state_dict or named tensors: pass model or "
                "model.named_parameters(), not model.parameters()"
            )
        _require_plain(*pair)
    return [(name, tensor) for name, tensor in pairs if tensor is not None]


def _require_plain(name: str, tensor: Any) -> None:
    if tensor is None:
        return
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"check_consistency compares tensors, but {name} is a {type(tensor).__name__}: leave it out")
    if torch.nn.parameter.is_lazy(tensor):
        raise UsageError(f"{name} has no values yet: run a forward first")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise UnsupportedError(f"{name} is sparse, quantized or on no device: only dense tensors are compared")
    if hasattr(tensor, "placements"):
        raise UnsupportedError(f"{name} is sharded between ranks, which hold different parts of it by design")
