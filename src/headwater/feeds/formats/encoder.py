"""The protocol of every format: an encoder of changes and snapshot rows, created once per shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from headwater.feeds.formats.frame import FrameTemplate
from headwater.feeds.options import Shape
from headwater.model.change import Change, Op, Transaction
from headwater.model.table import Row, Table

WriteChange = Callable[[Transaction, int, Change, Op], bytes]  # the signature of Encoder.change


class Encoder(Protocol):
    """Writes the changes of one database in one shape, with a cached plan per table version. Thread-safe."""

    def change(self, part: Transaction, offset: int, change: Change, op: Op) -> bytes:
        """Return `change` of `part` at `offset`, delivered as `op`: one message, in JSON one line.

        `op` determines the images: an insert has only its after image, a delete only its before image.
        """

    def row(self, table: Table, row: Row, offset: int, read_ms: int) -> bytes:
        """Return one message with a snapshot row that was read at `offset` and at the wall-clock time `read_ms`."""


class Frames(Protocol):
    """The framed changes of one page. Not thread-safe."""

    @property
    def count(self) -> int:
        """Return the number of frames."""

    @property
    def last(self) -> int:
        """Return the offset of the last frame."""

    @property
    def size(self) -> int:
        """Return the size of all frames in bytes."""

    @property
    def is_full(self) -> bool:
        """Return whether the page has reached its limit of frames or bytes."""

    def take(self, part: Transaction, ops: list[Op | None]) -> int:
        """Add the changes of `part`, delivered as `ops`, until the page is full, but at least one change.

        Return the number of changes processed, those without an op included.
        """

    def data(self) -> bytes:
        """Return all frames."""


@runtime_checkable
class WritesFrames(Encoder, Protocol):
    """An encoder that writes many changes at once."""

    def frames(
        self, enclosing: FrameTemplate, limit: int, most: int, schema_change: WriteChange | None = None
    ) -> Frames:
        """Return an empty page for frames of this kind, which is full at `limit` frames or `most` bytes.

        `schema_change` writes the schema changes; without it, `change` does.
        """


Maker = Callable[[Shape], Encoder]
