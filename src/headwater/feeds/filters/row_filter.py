"""The row filters of one subscription, compiled for one version of one table."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import msgspec

from headwater.errors import InvalidRequest
from headwater.feeds.options import Options, Shard
from headwater.model.keys.key import Span, decode_key, joined, prefix_end
from headwater.model.literal import Embedding, from_lit
from headwater.model.table import Key, Row, Table
from headwater.sources.read import Condition, Pin, Readable


class Interest(msgspec.Struct, frozen=True):
    """Necessary, not sufficient conditions for a row to pass, in a form that can be indexed. None: no condition."""

    points: frozenset[bytes] | None = None  # whole keys
    spans: tuple[Span, ...] | None = None  # sorted and disjoint
    pin: Pin | None = None
    shard: Shard | None = None


class Rule:
    """Decides which rows of `table` are inside the filter. Thread-safe."""

    def __init__(self, options: Options, table: Table, source: Readable) -> None:
        self.table = table
        self._points, self._spans = _keys(options, table, source)
        self._starts = [span.start for span in self._spans or ()]
        self._shard = options.shard
        self._order: KeyOrder | None = None  # created only if needed: not every key has a known order
        if self._points is not None or self._spans is not None or self._shard is not None:
            self._order = source.order(table, table.key)
        self._condition: Condition | None = None
        if options.where is not None:
            self._condition = source.condition(table, options.where)
        self._selected = tuple(table.index[name] for name in options.columns if name in table.index)
        self._watched = tuple(dict.fromkeys((*self._selected, *table.key_places)))

    @property
    def interest(self) -> Interest:
        """Return the conditions by which the router indexes the filter."""
        pin = None if self._condition is None else self._condition.pin
        return Interest(self._points, self._spans, pin, self._shard)

    @property
    def calls(self) -> tuple[str, ...]:
        """Return the functions in `where` that may read more than the row."""
        return () if self._condition is None else self._condition.calls

    @property
    def is_cheap(self) -> bool:
        """Return whether the rule is fast enough to be evaluated in the event loop."""
        return self._condition is None or self._condition.is_cheap

    def inside(self, rows: Sequence[Row]) -> list[bool]:
        """Return for each of `rows` whether it is inside the filter."""
        if self._order is None:
            found = [True] * len(rows)
        else:
            key_of, order = self.table.key_of, self._order
            found = [self._holds_key(order(key_of(row))) for row in rows]
        if self._condition is None:
            return found
        candidates = [index for index, inside in enumerate(found) if inside]
        for index, holds in zip(candidates, self._condition.holds([rows[index] for index in candidates]), strict=True):
            found[index] = holds
        return found

    def _holds_key(self, key: bytes) -> bool:
        if self._points is not None and key not in self._points:
            return False
        if self._spans is not None:
            found = bisect_right(self._starts, key) - 1
            if found < 0 or not self._spans[found].contains(key):
                return False
        return self._shard is None or share(key, self._shard.of) == self._shard.index

    def differs(self, before: Row, after: Row) -> bool:
        """Return whether a selected column or the key changed."""
        return any(not same(before[place], after[place]) for place in self._watched)

    @property
    def has_selected(self) -> bool:
        """Return whether the table has any of the selected columns."""
        return bool(self._selected)


def share(key: bytes, of: int) -> int:
    """Return the shard of an encoded key, out of `of`: its CRC-32 modulo `of`."""
    return zlib.crc32(key) % of


def same(a: Any, b: Any) -> bool:
    """Return whether two values are identical: 1 is not 1.0, 0.0 is not -0.0, 1.0 is not 1.00, and NaN is NaN."""
    if type(a) is not type(b):
        return False
    return repr(a) == repr(b) if isinstance(a, (float, Decimal, Embedding)) else bool(a == b)


KeyOrder = Callable[[Key], bytes]


def _keys(options: Options, table: Table, source: Readable) -> tuple[frozenset[bytes] | None, tuple[Span, ...] | None]:
    if all(part is None for part in (options.pk, options.key, options.pk_range, options.spans)):
        return None, None
    if not table.primary_key:
        raise InvalidRequest(
            f"{table.name!r} has no primary key to filter by", hint="Filter by `where`, or declare a primary key."
        )

    def bytes_of(lits: Sequence[Any]) -> bytes:
        columns = table.key[: len(lits)]
        values = tuple(map(from_lit, lits))
        if len(columns) != len(lits):
            raise InvalidRequest(
                f"the key of {table.name!r} has {len(table.key)} values, {len(lits)} given",
                hint=f"Its key columns are {', '.join(table.key)}.",
            )
        if None in values:
            raise InvalidRequest(
                f"a key filter on {table.name!r} contains null, and nothing compares with null",
                hint="Filter by `where` with IS NULL.",
            )
        return source.order(table, columns)(source.stored(table, columns, values))

    points: frozenset[bytes] | None = None
    if options.pk is not None:
        if len(options.pk) != len(table.key):
            raise InvalidRequest(
                f"pk has {len(options.pk)} values, the key of {table.name!r} has {len(table.key)}",
                hint=f"Its key columns are {', '.join(table.key)}.",
            )
        points = frozenset([bytes_of(options.pk)])
    if options.key is not None:
        if len(decode_key(options.key)) != len(table.key):
            hint = "Send the key bytes unchanged, as you received them."
            raise InvalidRequest(f"these bytes are not a key of {table.name!r}", hint=hint)
        points = frozenset([options.key])
    spans: tuple[Span, ...] | None = None
    if options.pk_range is not None:
        if len(table.key) != 1:
            raise InvalidRequest(
                f"pk_range needs a key of one column, the key of {table.name!r} has {len(table.key)}",
                hint="Use `spans` for composite keys.",
            )
        bounds = [options.pk_range.get(name) for name in ("lower_bound", "upper_bound")]
        if bounds == [None, None]:
            raise InvalidRequest("pk_range needs a lower_bound or an upper_bound", hint="Give one of them, or both.")
        spans = (Span.between(*(None if lit is None else bytes_of([lit]) for lit in bounds)),)
    if options.spans is not None:
        given = joined(_span(body, bytes_of) for body in options.spans)
        spans = given if spans is None else _both(spans, given)
    return points, spans


def _span(body: dict[str, Any], bytes_of: Callable[[Sequence[Any]], bytes]) -> Span:
    if "prefix" in body:
        start = bytes_of(body["prefix"])
        return Span(start, prefix_end(start))
    return Span.between(*(bytes_of(body[name]) if name in body else None for name in ("lower_bound", "upper_bound")))


def _both(left: tuple[Span, ...], right: tuple[Span, ...]) -> tuple[Span, ...]:
    met = (one.intersect(other) for one in left for other in right)
    return tuple(span for span in met if span is not None)
