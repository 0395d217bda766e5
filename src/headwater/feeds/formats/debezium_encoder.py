"""The encoder of debezium_json: the compiled module where it was built, else `debezium`. Both write the same bytes,
and tests run both."""

from __future__ import annotations

from headwater.feeds.formats.debezium import Debezium
from headwater.feeds.formats.encoder import Encoder, Frames, WriteChange, WritesFrames
from headwater.feeds.formats.envelope import FORM
from headwater.feeds.formats.frame import FrameTemplate
from headwater.feeds.options import Shape
from headwater.model.change import Change, Op, Transaction
from headwater.model.per_table import PerTable

try:
    from headwater.feeds.formats import debezium_compiled as built

    IS_BUILT = built.FORM == FORM
except ImportError:
    IS_BUILT = False


class Compiled(Debezium, WritesFrames):
    """Writes row changes with the compiled module, one by one or many at once; other changes in Python."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._compiled = PerTable(lambda table: built.Plan(self.plan(table)))

    def change(self, part: Transaction, offset: int, change: Change, op: Op) -> bytes:
        if op is Op.SCHEMA_CHANGE:
            return super().change(part, offset, change, op)
        return self._compiled(change.table).change(part, offset, change, op)

    def frames(
        self, enclosing: FrameTemplate, limit: int, most: int, schema_change: WriteChange | None = None
    ) -> Frames:
        return built.Frames(self._compiled, schema_change or super().change, enclosing, limit, most)


def debezium(shape: Shape) -> Encoder:
    """Return the fastest available encoder."""
    return Compiled(shape) if IS_BUILT else Debezium(shape)
