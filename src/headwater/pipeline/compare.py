"""Comparing rows by hash: digests per range of keys, and the changes that would make one side like the other."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import reduce
from typing import TYPE_CHECKING, Any

import msgspec

from headwater.errors import HeadwaterError
from headwater.model.key import Span, decode_key
from headwater.model.table import Key, Table

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# Kinds whose values Spark orders as their encoded keys are ordered.
ORDERED = {"i64": int, "str": str, "bytes": bytes}
RANGE, HASH = "_range", "_hash"


class Digest(msgspec.Struct, frozen=True):
    """What the rows of one range come to; equal rows give equal digests, in any order."""

    rows: int = 0
    sum: int = 0
    xor: int = 0


def comparable(table: Table, spans: Sequence[Span]) -> list[Span]:
    """`spans`, if Spark can tell in which of them a row lies; otherwise one span of everything."""
    columns = [table.columns[place] for place in table.key_places]
    if any(each.kind not in ORDERED or each.collation != "BINARY" for each in columns):
        return [Span.all()]
    kinds = [ORDERED[each.kind] for each in columns]
    for span in spans[1:]:
        key = _key(span)
        if key is None or [type(value) for value in key] != kinds:
            return [Span.all()]
    return list(spans)


def _key(span: Span) -> Key | None:
    try:
        return decode_key(span.start)
    except HeadwaterError:
        return None


def hashed(frame: DataFrame, columns: Sequence[str]) -> DataFrame:
    """`frame` with a hash of `columns`, in that order."""
    from pyspark.sql.functions import xxhash64

    return frame.withColumn(HASH, xxhash64(*[frame[name] for name in columns]))


def placed(frame: DataFrame, identity: Sequence[str], spans: Sequence[Span]) -> DataFrame:
    """`frame` with the number of the span each row lies in; `spans` come from `comparable`."""
    from pyspark.sql.functions import lit

    number: Column = lit(0)
    for span in spans[1:]:
        key = _key(span)
        assert key is not None
        number = number + _at_least(frame, identity, key).cast("int")
    return frame.withColumn(RANGE, number)


def _at_least(frame: DataFrame, identity: Sequence[str], key: Key) -> Column:
    """Whether a row's key is not below `key`, column by column."""
    from pyspark.sql.functions import lit

    found: Column = lit(True)
    for name, value in reversed(list(zip(identity, key, strict=True))):
        bound = lit(bytearray(value) if isinstance(value, bytes) else value)
        found = (frame[name] > bound) | ((frame[name] == bound) & found)
    return found


def digests(frame: DataFrame) -> dict[int, Digest]:
    """Range number to digest, of a frame that was placed and hashed."""
    from pyspark.sql.functions import bit_xor, col, count, lit
    from pyspark.sql.functions import sum as total

    wide = col(HASH).cast("decimal(38,0)")
    found = frame.groupBy(RANGE).agg(count(lit(1)).alias("n"), total(wide).alias("s"), bit_xor(HASH).alias("x"))
    return {row[RANGE]: Digest(row["n"], int(row["s"]), row["x"]) for row in found.collect()}


def differences(right: DataFrame, wrong: DataFrame, identity: Sequence[str], offset: int) -> DataFrame:
    """The changes that turn `wrong` into `right`; both hashed, with the same row columns.

    A row that only `wrong` has is a delete, one that is missing or differs there is an insert.
    """
    from pyspark.sql.functions import lit

    names = [name for name in right.columns if name not in (RANGE, HASH)]
    gone = wrong.join(right, _same(wrong, right, identity), "left_anti").select(*names)
    both = _same(right, wrong, identity) & (right[HASH] == wrong[HASH])
    lacking = right.join(wrong, both, "left_anti").select(*names)
    told = lacking.withColumn("_change_type", lit("insert")).unionByName(gone.withColumn("_change_type", lit("delete")))
    about: dict[str, Any] = {
        "_commit_version": lit(offset).cast("long"),
        "_commit_timestamp": lit(datetime.now(UTC)).cast("timestamp"),
        "_offset": lit(offset).cast("long"),
        "_txn": lit("repair"),
    }
    return reduce(lambda frame, name: frame.withColumn(name, about[name]), about, told)


def _same(one: DataFrame, other: DataFrame, identity: Sequence[str]) -> Column:
    conditions = [one[name].eqNullSafe(other[name]) for name in identity]
    return reduce(lambda a, b: a & b, conditions)
