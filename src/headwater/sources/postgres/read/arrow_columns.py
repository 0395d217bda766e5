"""Arrow columns from columns of PostgreSQL's text, by kind, all values at once. Pure.

For most types the Arrow column holds PostgreSQL's own text, or a number that Arrow parses. If a value does not fit (see
`types`: a value that its kind cannot hold stays its text), the result is None: then values are converted one by one.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headwater.model.literal import is_json
from headwater.sources.postgres import types


def array_of(oid: int, texts: pa.StringArray) -> pa.Array | None:
    """Return the values of base type `oid` as an Arrow column; None if Arrow's type cannot hold one of them."""
    make = _MAKERS.get(oid)
    return texts if make is None else make(texts)


def _all(found: Any) -> bool:
    """Return whether all values that are not null are true."""
    return bool(pc.all(found, min_count=0).as_py())


def _cast(name: str) -> Callable[[pa.StringArray], pa.Array]:
    return lambda texts: texts.cast(name)


def _bytes(texts: pa.StringArray) -> pa.Array | None:
    if not _all(pc.starts_with(texts, "\\x")):
        return None
    digits = pc.binary_replace_slice(texts, 0, 2, "")  # binary_slice without an end fails: "Negative buffer resize"
    bits, begins, data = digits.buffers()
    places = pa.Array.from_buffers(pa.int32(), digits.offset + len(digits) + 1, [None, begins])
    found = b"" if data is None else binascii.unhexlify(memoryview(data)[: places[-1].as_py()])
    halves = pc.shift_right(places, pa.scalar(1, pa.int32())).buffers()[1]
    return pa.Array.from_buffers(pa.binary(), len(digits), [bits, halves, pa.py_buffer(found)], offset=digits.offset)


def _dates(texts: pa.StringArray) -> pa.Array | None:
    # Other dates are longer (years of five digits, `BC`) or shorter (`infinity`).
    return texts if _all(pc.equal(pc.binary_length(texts), 10)) else None


def _timestamps(texts: pa.StringArray) -> pa.Array | None:
    # A year of five digits moves the space, and `infinity` has none.
    if not _all(pc.equal(pc.binary_slice(texts.cast(pa.binary()), 10, 11), b" ")) or _any_before_christ(texts):
        return None
    return pc.binary_replace_slice(texts, 10, 11, "T")


def _any_before_christ(texts: pa.StringArray) -> bool:
    return bool(pc.any(pc.ends_with(texts, "C"), min_count=0).as_py())


def _timestamptzs(texts: pa.StringArray) -> pa.Array | None:
    if not _all(pc.ends_with(texts, "+00")):
        return None
    found = _timestamps(texts)
    return None if found is None else pc.binary_join_element_wise(found, ":00", "")


def _jsons(texts: pa.StringArray) -> pa.Array | None:
    return texts if all(text is None or is_json(text) for text in texts.to_pylist()) else None


_MAKERS: dict[int, Callable[[pa.StringArray], pa.Array | None]] = {
    types.BOOL: lambda texts: pc.equal(texts, "t"),
    **dict.fromkeys((types.INT2, types.INT4, types.INT8, types.OID, types.XID, types.CID), _cast("int64")),
    types.XID8: _cast("uint64"),
    **dict.fromkeys((types.FLOAT4, types.FLOAT8), _cast("float64")),
    types.NUMERIC: lambda texts: texts if _all(pc.less_equal(pc.binary_length(texts), types.MAX_DIGITS)) else None,
    types.BYTEA: _bytes,
    **dict.fromkeys((types.JSON, types.JSONB), _jsons),
    types.DATE: _dates,
    types.TIMESTAMP: _timestamps,
    types.TIMESTAMPTZ: _timestamptzs,
    types.TIMETZ: lambda texts: None,
}
