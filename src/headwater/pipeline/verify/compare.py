"""Comparing rows by hash: digests per range of keys, and the changes that would make one side like the other."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import reduce
from typing import TYPE_CHECKING

import msgspec

from headwater.errors import HeadwaterError
from headwater.model.keys.key import Span, decode_key
from headwater.model.table import Key, Table
from headwater.pipeline.transform.compaction import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# Kinds whose values Spark orders as their encoded keys are ordered.
ORDERED = {"i64": int, "str": str, "bytes": bytes}
RANGE, HASH = "_headwater_range", "_headwater_hash"
EXAMPLES = 3  # keys of a range that are told


class Digest(msgspec.Struct, frozen=True):
    """What the rows of one range come to; equal rows give equal digests, in any order."""

    rows: int = 0
    sum: int = 0
    xor: int = 0


class Difference(msgspec.Struct, frozen=True):
    """How the rows of one range differ, by key."""

    missing: int = 0  # the source has them alone
    extra: int = 0  # the sink has them alone, or more than once
    different: int = 0
    examples: tuple[str, ...] = ()  # keys of some of them

    @property
    def rows(self) -> int:
        """All of them."""
        return self.missing + self.extra + self.different


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


def hashed(frame: DataFrame) -> DataFrame:
    """`frame` with a hash of all its columns, in their order."""
    from pyspark.sql.functions import isnull, xxhash64

    values = [frame[quoted(name)] for name in frame.columns]
    # Spark's hash passes over nulls: without the flags a value may move from one column to the next unseen.
    return frame.withColumn(HASH, xxhash64(*values, *map(isnull, values)))


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
        column = frame[quoted(name)]
        found = (column > bound) | ((column == bound) & found)
    return found


def digests(frame: DataFrame) -> dict[int, Digest]:
    """Range number to digest, of a frame that was placed and hashed."""
    from pyspark.sql.functions import bit_xor, col, count, lit
    from pyspark.sql.functions import sum as total

    wide = col(HASH).cast("decimal(38,0)")
    found = frame.groupBy(RANGE).agg(count(lit(1)).alias("n"), total(wide).alias("s"), bit_xor(HASH).alias("x"))
    return {row[RANGE]: Digest(row["n"], int(row["s"]), row["x"]) for row in found.collect()}


def repeated(frame: DataFrame, identity: Sequence[str]) -> DataFrame:
    """The rows of keys that are there more than once, one of each."""
    from pyspark.sql.functions import count, lit

    columns = [frame[quoted(name)] for name in identity]
    many = frame.groupBy(*columns).agg(count(lit(1)).alias(HASH)).where(f"{HASH} > 1")
    return frame.dropDuplicates(list(identity)).join(many, _same(frame, many, identity), "left_semi").drop(HASH, RANGE)


def differences(right: DataFrame, wrong: DataFrame, identity: Sequence[str]) -> tuple[DataFrame, DataFrame]:
    """What only `wrong` has, by key, and what is missing or differs there; both hashed, with the same columns."""
    gone = wrong.join(right, _same(wrong, right, identity), "left_anti")
    both = _same(right, wrong, identity) & (right[HASH] == wrong[HASH])
    return gone.drop(HASH, RANGE), right.join(wrong, both, "left_anti").drop(HASH, RANGE)


def difference(right: DataFrame, wrong: DataFrame, identity: Sequence[str]) -> dict[int, Difference]:
    """Range number to what differs there; both hashed and placed by the same numbers."""
    from pyspark.sql import Window
    from pyspark.sql.functions import col, greatest, lit, row_number, when
    from pyspark.sql.functions import max as highest
    from pyspark.sql.functions import min as lowest
    from pyspark.sql.functions import sum as total

    keys = [f"k{place}" for place in range(len(identity))]

    def side(frame: DataFrame, is_right: bool) -> DataFrame:
        named = [frame[quoted(name)].alias(key) for name, key in zip(identity, keys, strict=True)]
        return frame.select(*named, RANGE, HASH, lit(is_right).alias("is_right"))

    is_right, one = col("is_right"), lit(1)
    found = (
        side(right, True)
        .unionByName(side(wrong, False))
        .groupBy(RANGE, *keys)
        .agg(
            total(when(is_right, one).otherwise(0)).alias("rights"),
            total(when(is_right, 0).otherwise(one)).alias("wrongs"),
            lowest(HASH).alias("low"),
            highest(HASH).alias("high"),
        )
        .select(
            RANGE,
            *keys,
            greatest(col("rights") - col("wrongs"), lit(0)).alias("missing"),
            greatest(col("wrongs") - col("rights"), lit(0)).alias("extra"),
            when((col("rights") > 0) & (col("wrongs") > 0) & (col("low") != col("high")), one)
            .otherwise(0)
            .alias("different"),
        )
        .where("missing + extra + different > 0")
    )
    of_range = Window.partitionBy(RANGE)
    counted = [total(name).over(of_range).alias(name) for name in ("missing", "extra", "different")]
    numbered = row_number().over(of_range.orderBy(*keys)).alias("number")
    rows = found.select(RANGE, *keys, *counted, numbered).where(f"number <= {EXAMPLES}").collect()
    told: dict[int, Difference] = {}
    for row in sorted(rows, key=lambda row: (row[RANGE], row["number"])):
        before = told.get(row[RANGE], Difference())
        shown = (*before.examples, ", ".join(_shown(row[key]) for key in keys))
        told[row[RANGE]] = Difference(row["missing"], row["extra"], row["different"], shown)
    return told


def _shown(value: object) -> str:
    return f"x'{value.hex()}'" if isinstance(value, (bytes, bytearray)) else str(value)


def changes(deleted: DataFrame, inserted: DataFrame | None, names: Sequence[str], offset: int) -> DataFrame:
    """Rows as changes at `offset`; `names` are those of the five columns that changes have beside theirs."""
    from pyspark.sql.functions import lit

    told = deleted.withColumn(names[0], lit("delete"))
    if inserted is not None:
        told = inserted.withColumn(names[0], lit("insert")).unionByName(told)
    now = lit(datetime.now(UTC)).cast("timestamp")
    about = (lit(offset).cast("long"), now, lit(offset).cast("long"), lit("repair"))
    return told.withColumns(dict(zip(names[1:], about, strict=True)))


def _same(one: DataFrame, other: DataFrame, identity: Sequence[str]) -> Column:
    conditions = [one[quoted(name)].eqNullSafe(other[quoted(name)]) for name in identity]
    return reduce(lambda a, b: a & b, conditions)
