"""The cells of an answer as Arrow columns of text: by `text_cells_compiled` where built, without an object per cell;
otherwise in Python, cell by cell."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from psycopg import pq

from headwater.sources.postgres.protocol_session import cells_of

if TYPE_CHECKING:
    import pyarrow as pa

FORM = 1  # version of the compiled module's interface: a module built for another version is not used
NULL_WEIGHT = 8
MOST = 2**31 - 1  # limit of an Arrow text column in bytes


class Texts(NamedTuple):
    """The columns of an answer, the bytes of its rows, and the bytes of the largest row."""

    columns: list[pa.StringArray]
    weight: int
    heaviest: int


def in_python(result: pq.abc.PGresult) -> Texts:
    """Return the columns of `result`, converted cell by cell; see `texts_of`."""
    import pyarrow as pa

    rows = cells_of(result)
    weights = [sum([NULL_WEIGHT if cell is None else len(cell) for cell in row]) for row in rows]
    if sum(weights) > MOST and len(rows) > 1:
        raise OverflowError
    found = zip(*rows, strict=True) if rows else [()] * result.nfields
    columns = [pa.array(column, pa.binary()).cast(pa.string()) for column in found]
    return Texts(columns, sum(weights), max(weights, default=0))


def _compiled() -> Callable[[pq.abc.PGresult], Texts] | None:
    try:
        from headwater.sources.postgres.read import text_cells_compiled

        library = ctypes.CDLL(importlib.import_module(pq.PGresult.__module__).__file__)  # linked to psycopg's libpq
        names = ("PQgetvalue", "PQgetlength", "PQgetisnull")
        value, length, is_null = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names]
    except (ImportError, OSError, AttributeError):
        return None
    if text_cells_compiled.FORM != FORM or pq.__impl__ not in ("binary", "c"):
        return None

    def take(result: pq.abc.PGresult) -> Texts:
        import pyarrow as pa

        address: int = result.pgresult_ptr  # type: ignore[attr-defined]  # the protocol leaves it out
        rows = result.ntuples
        found, weight, heaviest = text_cells_compiled.columns(address, rows, result.nfields, value, length, is_null)
        columns = []
        for there, begins, data in found:
            bits = None if there is None else pa.py_buffer(there)
            column = pa.StringArray.from_buffers(rows, pa.py_buffer(begins), pa.py_buffer(data), bits)
            column.validate(full=True)  # checks for UTF-8, which PostgreSQL guarantees
            columns.append(column)
        return Texts(columns, weight, heaviest)

    return take


COMPILED = _compiled()


def texts_of(result: pq.abc.PGresult) -> Texts:
    """Return the cells of `result`; raise OverflowError if a column of several rows is too large for Arrow."""
    return (COMPILED or in_python)(result)
