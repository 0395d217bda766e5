"""What every format offers: changes and snapshot rows to bytes, made once per shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

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


Maker = Callable[[Shape], Encoder]
