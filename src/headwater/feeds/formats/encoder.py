"""What every format offers: changes and snapshot rows to bytes, made once per shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from headwater.feeds.formats.frame import Enclosing
from headwater.feeds.options import Shape
from headwater.model.change import Change, Op, Transaction
from headwater.model.table import Row, Table


class Encoder(Protocol):
    """Writes the changes of one database in one shape. Holds plans per table shape; use from any thread."""

    def change(self, part: Transaction, offset: int, change: Change, op: Op) -> bytes:
        """`change` of `part` at `offset`, delivered as `op`: one compact JSON object without line breaks.

        `op` tells the images: an insert has only its after image, a delete only its before image.
        """
        ...

    def row(self, table: Table, row: Row, offset: int, read_ms: int) -> bytes:
        """A row of a snapshot that was read at `offset` and at the wall-clock time `read_ms`."""
        ...


class Frames(Protocol):
    """Changes one after another, each in its frame. For one page, in one thread."""

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    @property
    def last(self) -> int:
        """The offset of the last."""
        ...

    @property
    def size(self) -> int:
        """Their bytes."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether no more will be taken."""
        ...

    def take(self, part: Transaction, ops: list[Op | None]) -> int:
        """Add the changes of `part` as what `ops` say, until it is full, but one at least.

        Returns how many were looked at, those that have no op included.
        """
        ...

    def data(self) -> bytes:
        """Everything that was written."""
        ...


@runtime_checkable
class WritesFrames(Protocol):
    """An encoder that writes many changes at once."""

    def frames(self, enclosing: Enclosing, limit: int, most: int) -> Frames:
        """Nothing yet, to be written in frames of this kind; full when there are `limit`, or `most` bytes."""
        ...


Maker = Callable[[Shape], Encoder]
