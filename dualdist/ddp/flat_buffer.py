"""The memory in which gradients travel, and which become the parameters' gradients."""

from __future__ import annotations

import gc
import itertools
import operator
import weakref
from collections.abc import Callable, Sequence

import torch

from dualdist.backends.base import Buffer
from dualdist.backends.buffers import reference_counts, storage_uses
from dualdist.ddp.bucket_plan import BucketPlan
from dualdist.errors import CollectiveError, UnsupportedError

# Note [gradients in the bucket]: the parameters' gradients become views of the row in which what has been reduced lies;
# a copy is made only where a program keeps the tensor that autograd made. A row in which somebody still looks at
# gradients (a parameter that was not set to None, or a program that has kept one) is not written to again: another
# takes its place until then. Of rows in memory that ranks share there are few, and one must be free when the next
# round begins: where none would be, what has been reduced is copied to a row of this rank's own. A program may move a
# gradient to other memory (`param.grad.data = x`), or all that lies beside it too (share_memory_()): then the row is no
# row any more, and another is made in its place.

# Makes the row of that number.
BufferFactory = Callable[[int], "FlatBuffer | None"]


class FlatBuffer:
    """A row of elements, and in it a view of each gradient and the tail of flags."""

    def __init__(self, values: torch.Tensor, plan: BucketPlan, number: int, buffer: Buffer | None = None) -> None:
        counts = plan.counts
        alone = storage_uses(values) - 1
        self.number = number  # among the rows of its bucket
        self.values = values
        self.buffer = buffer  # whose values these are
        self.gradients, self.tail = values[: sum(counts)], values[sum(counts) :]
        pieces = self.gradients.split(counts)
        self.views = {
            number: piece.as_strided(plan.shapes[number], plan.strides[number], piece.storage_offset())
            for number, piece in enumerate(pieces)
            if number not in plan.apart
        }
        del pieces  # which would count as kept
        self.all_views = list(self.views.values())
        self._references = reference_counts(self.all_views)
        self._address, self._addresses = values.data_ptr(), list(map(torch.Tensor.data_ptr, self.all_views))
        # Counted, not measured: what others drop meanwhile must not matter.
        self._uses = len((values, self.gradients, self.tail)) + len(self.views)
        # The rows in this memory: buckets that take each other's place may lie there at the same time.
        self._rows: weakref.WeakSet[FlatBuffer] = weakref.WeakSet() if buffer is None else buffer.rows
        self._uses_without_rows = alone if buffer is None else buffer.uses_without_rows
        self._rows.add(self)

    def is_kept(self) -> bool:
        """Whether anybody else looks at these elements: parameters' gradients, and what a program has kept of them."""
        rows = list(self._rows)  # none of which is collected while they are counted
        ours = self._uses_without_rows + sum(row._uses for row in rows)
        return storage_uses(self.values) > ours or any(row._is_referred_to() for row in rows)

    def has_moved(self) -> bool:
        """Whether a program has moved something that lay here to other memory: Note [gradients in the bucket]."""
        addresses = list(map(torch.Tensor.data_ptr, self.all_views))
        return self.values.data_ptr() != self._address or addresses != self._addresses

    def _is_referred_to(self) -> bool:
        return any(map(operator.gt, reference_counts(self.all_views), self._references))


class BufferPool:
    """Buffers of one bucket used in turn; `make(number)` creates one where needed, None if there is no other."""

    def __init__(self) -> None:
        self._rows: list[
            FlatBuffer
        ] = []  # the last is the one that was used last; of more than two the others are forgotten

    def free(self, make: BufferFactory) -> FlatBuffer:
        """A row to write to, in which nobody looks."""
        row = self._find(self._rows) or self._new(make)
        if row is None:
            gc.collect()  # what looks at them may be garbage already
            row = self._find(self._rows)
        if row is None:
            raise CollectiveError("the program looks at gradients in all the memory that ranks share for them")
        others = [other for other in self._rows if other is not row]
        self._rows = [*others[-1:], row]
        return row

    def has_another(self, make: BufferFactory) -> bool:
        """Whether one would be free if somebody looked at the one that was used last."""
        last = self._rows[-1]
        has_one = self._find(self._rows[:-1]) is not None or self._new(make) is not None
        self._rows.sort(key=lambda row: row is last)
        return has_one

    def clear(self) -> None:
        self._rows.clear()

    def _find(self, rows: Sequence[FlatBuffer]) -> FlatBuffer | None:
        for row in rows[::-1]:
            if not row.is_kept():
                if not row.has_moved():
                    return row
                self._rows.remove(row)
        return None

    def _new(self, make: BufferFactory) -> FlatBuffer | None:
        while (row := make(self._lowest_number())) is not None:
            self._rows = [*self._rows, row][-2:]
            if not row.is_kept():  # else an earlier bucket's gradients lie there
                return row
        return None

    def _lowest_number(self) -> int:
        """Of a row that is not there."""
        taken = {row.number for row in self._rows}
        return next(number for number in itertools.count() if number not in taken)


class ProducerStreams:
    """Those on which the gradients of one bucket were finished. The host waits for none of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: set[torch.cuda.Stream] = set()

    def note(self) -> None:
        """A gradient has been finished on the current stream."""
        self._seen.add(torch.cuda.current_stream(self._device))

    def join(self, tensors: Sequence[torch.Tensor]) -> None:
        """The current stream goes on when all have come so far; it reads the tensors, which may be freed before."""
        current = torch.cuda.current_stream(self._device)
        others = self._seen - {current}
        for other in others:
            current.wait_stream(other)
        for tensor in tensors if others else ():
            tensor.record_stream(current)

    def forget(self) -> None:
        """They are those of a round that is over."""
        self._seen.clear()


def refuse_capture() -> None:
    """UnsupportedError where the current stream is being captured into a CUDA graph."""
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "backward() of a wrapped optimizer's parameters cannot be captured in a CUDA graph: before gradients are "
            "reduced the ranks tell each other what they have, which a replay would leave out. "
            "torch.cuda.make_graphed_callables captures a model's own work, and leaves the reduction outside"
        )
