"""Storage in `_misfit` for numbers that a database cannot hold, next to the misfits of the source.

Their column then holds null for NaN and the infinities, and zero for the negative zero. A source never reports a
float as the misfit of a float column, so `restore` recognizes each number that `set_aside` moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from headwater.errors import InvalidRequest
from headwater.model.literal import from_lit, to_lit
from headwater.pipeline.sinks.sql.dialects import MISFIT, MYSQL, SQLITE, Field
from headwater.pipeline.transform.unchanged_columns import kept

if TYPE_CHECKING:
    import pyarrow as pa


def set_aside(batch: pa.RecordBatch, fields: Sequence[Field], backend: str) -> pa.RecordBatch:
    """Return `batch` with the numbers that `backend` cannot hold moved from their columns to `_misfit`."""
    import pyarrow as pa

    columns, told = list(batch.columns), _misfit_column(fields)
    for place, field in enumerate(fields):
        strange = _strange(columns[place], backend) if field.kind == "f64" and told is not None else None
        if strange is None or told is None:
            continue
        misfits = columns[told].to_pylist()
        values = columns[place].to_pylist()
        for at in strange:
            found = msgspec.json.decode(misfits[at]) if misfits[at] else {}
            misfits[at] = msgspec.json.encode({**found, field.name: to_lit(values[at])}).decode()
            values[at] = 0.0 if values[at] == 0 else None
        columns[place], columns[told] = pa.array(values, pa.float64()), pa.array(misfits, pa.string())
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def keep_aside(batch: pa.RecordBatch, fields: Sequence[Field]) -> tuple[pa.RecordBatch, list[str | None]]:
    """Return `batch` without the marks of unchanged values in `_misfit`, and each row's unchanged fields by number.

    The last column of `batch` marks deletes, which need no values.
    """
    import pyarrow as pa

    told = _misfit_column(fields)
    if told is None:
        return batch, [None] * batch.num_rows
    gone = batch.column(len(fields)).to_pylist()
    found = [
        kept(None if is_gone else text) for text, is_gone in zip(batch.column(told).to_pylist(), gone, strict=True)
    ]
    if not any(names for names, _ in found):
        return batch, [None] * batch.num_rows
    columns = list(batch.columns)
    columns[told] = pa.array([rest for _, rest in found], pa.string())
    numbers = {field.name: place for place, field in enumerate(fields)}
    stay = [",".join(str(place) for place in sorted(map(numbers.__getitem__, names))) or None for names, _ in found]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema), stay


def restore(columns: Sequence[Sequence[Any]], fields: Sequence[Field]) -> list[Sequence[Any]]:
    """Return the columns as they were before `set_aside`."""
    told = _misfit_column(fields)
    if told is None or not any(columns[told]):
        return list(columns)
    made = [list(values) for values in columns]
    for at, text in enumerate(columns[told]):
        found = msgspec.json.decode(text) if text else {}
        ours = {place: found[field.name] for place, field in enumerate(fields) if _is_ours(found, field)}
        for place, lit in ours.items():
            made[place][at] = from_lit(lit)
            del found[fields[place].name]
        if ours:
            made[told][at] = msgspec.json.encode(found).decode() if found else None
    return list(made)


def _misfit_column(fields: Sequence[Field]) -> int | None:
    return next((place for place, field in enumerate(fields) if field.kind == MISFIT), None)


def _strange(values: pa.Array, backend: str) -> list[int] | None:
    """Return the positions of numbers that `backend` cannot hold; None if there are none."""
    import pyarrow.compute as pc

    if backend not in (MYSQL, SQLITE):
        return None
    unknown = pc.invert(pc.is_finite(values)) if backend == MYSQL else pc.is_nan(values)
    negative_zero = pc.and_(pc.equal(values, 0.0), pc.less(pc.divide(1.0, values), 0.0))
    found = pc.or_(unknown, negative_zero)
    places: list[int] = pc.indices_nonzero(found.fill_null(False)).to_pylist()
    return places or None


def _is_ours(found: dict[str, Any], field: Field) -> bool:
    if field.kind != "f64" or field.name not in found:
        return False
    try:
        return isinstance(from_lit(found[field.name]), float)
    except InvalidRequest:
        return False
