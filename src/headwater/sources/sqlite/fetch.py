"""Reading rows that may hold text which is not UTF-8: exact, at the price of a second query when one does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import apsw

Run = Callable[[str, Any], apsw.Cursor]
SLICE = 16  # rows read before one of them is weighed


def fetch(run: Run, sql: str, bindings: Any, width: int) -> list[tuple[Any, ...]]:
    """All rows of `sql`, which yields `width` columns. Broken bytes become surrogates in the text."""
    try:
        return run(sql, bindings).fetchall()
    except UnicodeDecodeError:
        return [_join(row) for row in run(_as_blobs(sql, width), bindings)]


def fetch_about(run: Run, sql: str, bindings: Any, width: int, *, weight: int) -> list[tuple[Any, ...]]:
    """The first rows of `sql`, about `weight` bytes of them: every so many rows one is weighed for all."""
    try:
        return _sliced(run(sql, bindings), tuple, weight)
    except UnicodeDecodeError:
        return _sliced(run(_as_blobs(sql, width), bindings), _join, weight)


def _sliced(cursor: apsw.Cursor, make: Callable[[Any], tuple[Any, ...]], weight: int) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    heavy = 0
    try:
        while heavy <= weight:
            some = [make(row) for row in islice(cursor, SLICE if heavy < weight // 2 else 1)]
            if not some:
                break
            found += some
            heavy += len(some) * _weight(some[-1])
    finally:
        cursor.close()  # an unfinished statement would keep its read transaction
    return found


def _weight(row: tuple[Any, ...]) -> int:
    return sum(len(value) if isinstance(value, (str, bytes)) else 8 for value in row)


def fetch_upto(
    run: Run, sql: str, bindings: Any, width: int, *, rows: int, weight: int
) -> tuple[list[tuple[Any, ...]], bool]:
    """The first rows of `sql`: at most `rows`, and no more once they weigh `weight` bytes; whether there are others."""
    try:
        return take(run(sql, bindings), tuple, rows, weight)
    except UnicodeDecodeError:
        return take(run(_as_blobs(sql, width), bindings), _join, rows, weight)


def take(
    cursor: apsw.Cursor, make: Callable[[Any], tuple[Any, ...]], rows: int, weight: int, *, to_end: bool = False
) -> tuple[list[tuple[Any, ...]], bool]:
    """The first rows of `cursor`; whether there are others. `to_end`: it is run to its end all the same."""
    found: list[tuple[Any, ...]] = []
    heavy, more = 0, False
    try:
        for row in cursor:
            if more or len(found) >= rows or heavy > weight:
                more = True
                if not to_end:
                    break
                continue
            found.append(make(row))
            heavy += _weight(row)
    finally:
        cursor.close()  # an unfinished statement would keep its read transaction
    return found, more


def _as_blobs(sql: str, width: int) -> str:
    names = [f"q{place}" for place in range(width)]
    cells = ", ".join(
        f"typeof({n}) = 'text', CASE typeof({n}) WHEN 'text' THEN CAST({n} AS BLOB) ELSE {n} END" for n in names
    )
    return f"WITH q({', '.join(names)}) AS ({sql}) SELECT {cells} FROM q"


def _join(row: tuple[Any, ...]) -> tuple[Any, ...]:
    pairs = zip(row[::2], row[1::2], strict=True)
    return tuple(value.decode("utf-8", "surrogateescape") if text else value for text, value in pairs)
