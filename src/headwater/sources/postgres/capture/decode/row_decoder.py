"""The choice of the decoder of row messages: `row_decoder_compiled` where built, else its twin `row_decoder_python`.
Both decode alike; tests run both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from headwater.model.change import Op
from headwater.model.table import Table
from headwater.sources.postgres.capture.decode import row_decoder_python
from headwater.sources.postgres.capture.decode.row_plan import FORM, Decode, DiagnosticDecoder, Plan, Take
from headwater.sources.postgres.types import Convert


class Twin(msgspec.Struct, frozen=True):
    """One of the two equivalent implementations of row decoding, compiled or in Python."""

    name: str
    make: Callable[[Plan], Decode]
    take: Take


PYTHON = Twin("python", row_decoder_python.Decoder, row_decoder_python.take)


def _compiled() -> Twin | None:
    try:
        from headwater.sources.postgres.capture.decode import row_decoder_compiled as found
    except ImportError:
        return None
    return Twin("compiled", found.Decoder, found.take) if found.FORM == FORM else None


COMPILED = _compiled()
_chosen = COMPILED or PYTHON


def twin() -> Twin:
    """Return the implementation in use: the compiled one where it was built."""
    return _chosen


_FUNCTIONS = {
    (b"I", b"N"): (Op.INSERT, "new"),
    (b"U", b"N"): (Op.UPDATE, "new"),
    (b"U", b"K"): (Op.UPDATE, "key"),
    (b"U", b"O"): (Op.UPDATE, "all"),
    (b"D", b"K"): (Op.DELETE, "key"),
    (b"D", b"O"): (Op.DELETE, "all"),
}


class RowDecoders:
    """The decoders of a table in one shape. `keys`: which columns of an old row are known when only its key is sent."""

    def __init__(
        self, oid: int, table: Table, keys: Sequence[bool], converts: Sequence[Convert], by: Twin | None = None
    ) -> None:
        self.table, self._twin = table, by or twin()
        self._oid, self._keys, self._converts = oid.to_bytes(4, "big"), tuple(keys), tuple(converts)
        self._careful = DiagnosticDecoder(table, keys, converts)
        self.made: dict[bytes, Decode] = {}  # by the first HEAD bytes of a message

    def of(self, head: bytes) -> Decode | None:
        """Return the decoder of messages that begin with `head`; None if there is none. Decoders are made on demand:
        few tables see all kinds of changes."""
        found = _FUNCTIONS.get((head[:1], head[5:]))
        if found is None or head[1:5] != self._oid:
            return None
        if head not in self.made:
            self.made[head] = self._twin.make(Plan(*found, self.table, self._keys, self._converts, self._careful))
        return self.made[head]
