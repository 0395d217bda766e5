"""Every part ends with a mark; a part without it, or with fewer rows, is not loaded."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest

from headwater.errors import Unavailable
from headwater.pipeline.spark.part_ends import checked, ended, with_end

ROWS = pa.schema([("id", pa.int64()), ("name", pa.string())])


def batch(*ids: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(ids, pa.int64()), pa.array([f"n{id}" for id in ids])], schema=ROWS)


def ids(batches: Sequence[pa.RecordBatch]) -> list[int]:
    return [row["id"] for each in batches for row in each.to_pylist()]


@pytest.mark.parametrize("given", [[], [batch()], [batch(1, 2, 3)], [batch(1), batch(2, 3), batch(4)]])
def test_rows_with_an_end_mark_are_returned_unchanged(given: list[pa.RecordBatch]) -> None:
    told = list(ended(iter(given), with_end(ROWS)))
    found = list(checked(iter(told)))
    assert all(each.schema == ROWS for each in found)
    assert ids(found) == ids(given)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_rows_with_an_end_mark_survive_another_batch_size(size: int) -> None:
    told = pa.Table.from_batches(list(ended(iter([batch(1, 2, 3), batch(4, 5)]), with_end(ROWS))))
    assert ids(list(checked(iter(told.combine_chunks().to_batches(max_chunksize=size))))) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_part_without_any_of_its_batches_is_refused(lost: int) -> None:
    told = list(ended(iter([batch(1, 2), batch(3)]), with_end(ROWS)))
    del told[lost]
    with pytest.raises(Unavailable, match="truncated"):
        list(checked(iter(told)))


def test_part_without_an_end_mark_is_refused() -> None:
    with pytest.raises(Unavailable, match="after 0 rows"):
        list(checked(iter(())))


def test_user_column_named_like_the_end_mark_is_kept() -> None:
    assert with_end(pa.schema([("_end", pa.string())])).names == ["_end", "__end"]
