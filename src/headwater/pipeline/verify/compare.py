"""Comparison of rows by hash: digests per range of keys, and the changes that make one side equal to the other."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import reduce
from typing import TYPE_CHECKING

from headwater.errors import HeadwaterError
from headwater.model.keys.key import Span, decode_key
from headwater.model.table import Key, Table
from headwater.pipeline.run.table_report import Difference, Digest
from headwater.pipeline.transform.compaction import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# Kinds whose values have the order of their encoded keys in Spark.
ORDERED = {"i64": int, "str": str, "bytes": bytes}
RANGE, HASH = "_headwater_range", "_headwater_hash"
EXAMPLES = 3  # keys listed per range


def comparable(table: Table, spans: Sequence[Span]) -> list[Span]:
    """Return `spans` if Spark can compute the span of a row; otherwise one span of all keys."""
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
    """Return `frame` with the column HASH, a hash of all its columns in their order."""
    from pyspark.sql.functions import isnull, xxhash64

    values = [frame[quoted(name)] for name in frame.columns]
    # Spark's hash skips nulls: without the flags a value could move to the next column undetected.
    return frame.withColumn(HASH, xxhash64(*values, *map(isnull, values)))


def placed(frame: DataFrame, identity: Sequence[str], spans: Sequence[Span]) -> DataFrame:
    """Return `frame` with the column RANGE, the number of each row's span; `spans` are from `comparable`."""
    from pyspark.sql.functions import lit

    number: Column = lit(0)
    for span in spans[1:]:
        key = _key(span)
        assert key is not None
        number = number + _at_least(frame, identity, key).cast("int")
    return frame.withColumn(RANGE, number)


def _at_least(frame: DataFrame, identity: Sequence[str], key: Key) -> Column:
    """Return the condition that a row's key is `key` or higher, compared column by column."""
    from pyspark.sql.functions import lit

    found: Column = lit(True)
    for name, value in reversed(list(zip(identity, key, strict=True))):
        bound = lit(bytearray(value) if isinstance(value, bytes) else value)
        column = frame[quoted(name)]
        found = (column > bound) | ((column == bound) & found)
    return found


def digests(frame: DataFrame) -> dict[int, Digest]:
    """Return the digest per range number of a frame from `hashed` and `placed`."""
    from pyspark.sql.functions import bit_xor, col, count, lit
    from pyspark.sql.functions import sum as total

    wide = col(HASH).cast("decimal(38,0)")
    found = frame.groupBy(RANGE).agg(count(lit(1)).alias("n"), total(wide).alias("s"), bit_xor(HASH).alias("x"))
    return {row[RANGE]: Digest(row["n"], int(row["s"]), row["x"]) for row in found.collect()}


def repeated(frame: DataFrame, identity: Sequence[str]) -> DataFrame:
    """Return one row for each key that occurs more than once."""
    from pyspark.sql.functions import count, lit

    columns = [frame[quoted(name)] for name in identity]
    many = frame.groupBy(*columns).agg(count(lit(1)).alias(HASH)).where(f"{HASH} > 1")
    return frame.dropDuplicates(list(identity)).join(many, _same(frame, many, identity), "left_semi").drop(HASH, RANGE)


def differences(right: DataFrame, wrong: DataFrame, identity: Sequence[str]) -> tuple[DataFrame, DataFrame]:
    """Return the rows whose key only `wrong` has, and the rows of `right` that `wrong` lacks or has differently.

    Both frames are hashed and have equal columns.
    """
    gone = wrong.join(right, _same(wrong, right, identity), "left_anti")
    both = _same(right, wrong, identity) & (right[HASH] == wrong[HASH])
    return gone.drop(HASH, RANGE), right.join(wrong, both, "left_anti").drop(HASH, RANGE)


def difference(right: DataFrame, wrong: DataFrame, identity: Sequence[str]) -> dict[int, Difference]:
    """Return the difference per range number; both frames are hashed and placed by equal range numbers."""
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
    """Return the rows as changes at `offset`; `names` are the five columns that describe a change."""
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
