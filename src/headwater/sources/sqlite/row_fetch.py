"""Reads of rows that may hold text that is not UTF-8: exact, with a second query where there is such text."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import apsw

from headwater.model.work.answer_limits import AnswerRows, Reservation, extra_memory, extra_memory_of_utf8
from headwater.model.work.answer_limits import weight as weigh

Run = Callable[[str, Any], apsw.Cursor]
SLICE = 16  # rows read before one of them is measured
PIECE = 1 << 20  # bytes of text decoded without a pause
FREED = 256  # rows freed without a pause
TURN = 0.002  # seconds that rows are read without a pause
PAUSE = 20e-6  # seconds requested; the system sleeps about 80 microseconds, enough for a waiting thread to wake up


def fetch(run: Run, sql: str, bindings: Any, width: int) -> list[tuple[Any, ...]]:
    """Return all rows of `sql`, which has `width` columns; invalid bytes become surrogates in the text."""
    try:
        return run(sql, bindings).fetchall()
    except UnicodeDecodeError:
        return [join(row) for row in run(as_blobs(sql, width), bindings)]


def fetch_about(run: Run, sql: str, bindings: Any, width: int, *, weight: int) -> list[tuple[Any, ...]]:
    """Return the first rows of `sql`, about `weight` bytes; one of every few rows is measured for all of them."""
    try:
        return _sliced(run(sql, bindings), tuple, weight)
    except UnicodeDecodeError:
        return _sliced(run(as_blobs(sql, width), bindings), join, weight)


def paced(cursor: apsw.Cursor) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of `cursor`, with a pause every few milliseconds in which other threads run.

    Each step of SQLite releases the interpreter's lock and takes it again within microseconds. A thread that waits for
    the lock is woken by every release, finds the lock taken again, and restarts its wait instead of requesting the
    lock: without a pause such a thread waits for hundreds of milliseconds.
    """
    until = time.monotonic() + TURN
    for row in cursor:
        yield row
        if time.monotonic() > until:
            time.sleep(PAUSE)
            until = time.monotonic() + TURN


def _sliced(cursor: apsw.Cursor, make: Callable[[Any], tuple[Any, ...]], weight: int) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    heavy = 0
    rows = paced(cursor)
    with closing(cursor):  # an unfinished statement would keep its read transaction open
        while heavy <= weight:
            some = [make(row) for row in islice(rows, SLICE if heavy < weight // 2 else 1)]
            if not some:
                break
            found += some
            heavy += len(some) * weigh(some[-1])
    return found


def fetch_upto(
    run: Run, sql: str, bindings: Any, width: int, *, rows: int, weight: int
) -> tuple[list[tuple[Any, ...]], bool]:
    """Return the first rows of `sql`, at most `rows` and until they exceed `weight` bytes; whether there are more."""
    try:
        return take(run(sql, bindings), tuple, rows, weight)
    except UnicodeDecodeError:
        return take(run(as_blobs(sql, width), bindings), join, rows, weight)


def take(
    cursor: apsw.Cursor, make: Callable[[Any], tuple[Any, ...]], rows: int, weight: int
) -> tuple[list[tuple[Any, ...]], bool]:
    """Return the first rows of `cursor`, and whether there are more."""
    found: list[tuple[Any, ...]] = []
    heavy = 0
    with closing(cursor):  # an unfinished statement would keep its read transaction open
        for row in paced(cursor):
            if len(found) >= rows or heavy > weight:
                return found, True
            found.append(make(row))
            heavy += weigh(row)
    return found, False


def collect(
    cursor: apsw.Cursor,
    make: Callable[[Any], tuple[Any, ...]],
    rows: int,
    *,
    to_end: bool = False,
    extra: Callable[[tuple[Any, ...]], int] = extra_memory,
) -> tuple[AnswerRows, bool]:
    """Return the first `rows` rows of an answer, and whether there are more.

    With `to_end` the statement still runs to its end. `extra` measures a row as `extra_memory` does. Raises
    AnswerTooLarge, Busy.
    """
    found: list[tuple[Any, ...]] = []
    reservation, more = Reservation(), False
    try:
        for row in paced(cursor):
            if len(found) >= rows:
                more = True
                if not to_end:
                    break
                continue
            reservation.add(weigh(row), len(row), extra(row))
            found.append(make(row))
    except BaseException:  # the exception may keep this frame alive for a while
        while found:  # freed in pieces: freeing millions of values at once would block other threads
            del found[-FREED:]
        reservation.release()
        raise
    finally:
        cursor.close()  # an unfinished statement would keep its read transaction open
    return AnswerRows.of(found, reservation), more


def as_blobs(sql: str, width: int, *, most: int | None = None) -> str:
    """Return `sql` with two columns for each of its own: whether it is text, and the value with text as a blob.

    With `most` a row with more bytes fails as too big before any value is read: LIMIT keeps SQLite from computing the
    columns again for the result.
    """
    names = [f"q{place}" for place in range(width)]
    cells = ", ".join(
        f"typeof({n}) = 'text', CASE typeof({n}) WHEN 'text' THEN CAST({n} AS BLOB) ELSE {n} END" for n in names
    )
    if most is None:
        return f"WITH q({', '.join(names)}) AS ({sql}\n) SELECT {cells} FROM q"
    size = " + ".join(f"coalesce(octet_length({n}), 0)" for n in names)
    fits = f"CASE WHEN {size} > {most} THEN zeroblob(2147483647) ELSE 1 END"
    return f"WITH q({', '.join(names)}) AS (SELECT * FROM ({sql}\n) LIMIT -1) SELECT {cells} FROM q WHERE {fits}"


def join(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values of a row of `as_blobs`; bytes that are not UTF-8 become surrogates."""
    pairs = zip(row[::2], row[1::2], strict=True)
    return tuple(_decoded(value) if text else value for text, value in pairs)


def extra_memory_of_blobs(row: tuple[Any, ...]) -> int:
    """Return the most `extra_memory` that the texts in a row of `as_blobs` can take once decoded."""
    return extra_memory_of_utf8(value for is_text, value in zip(row[::2], row[1::2], strict=True) if is_text)


def _decoded(value: bytes) -> str:
    """Decode text in pieces, so that other threads run in between."""
    if len(value) <= PIECE:
        return value.decode("utf-8", "surrogateescape")
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    with memoryview(value) as view:
        pieces = [decoder.decode(view[start : start + PIECE]) for start in range(0, len(value), PIECE)]
    return "".join([*pieces, decoder.decode(b"", True)])
