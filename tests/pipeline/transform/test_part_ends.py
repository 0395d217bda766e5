"""The end of a part is told in it, and a part without it, or with fewer rows, is not taken for whole."""

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
def test_what_was_ended_comes_out_as_it_went_in(given: list[pa.RecordBatch]) -> None:
    told = list(ended(iter(given), with_end(ROWS)))
    found = list(checked(iter(told)))
    assert all(each.schema == ROWS for each in found)
    assert ids(found) == ids(given)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_batches_may_be_cut_otherwise_on_the_way(size: int) -> None:
    told = pa.Table.from_batches(list(ended(iter([batch(1, 2, 3), batch(4, 5)]), with_end(ROWS))))
    assert ids(list(checked(iter(told.combine_chunks().to_batches(max_chunksize=size))))) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_part_that_lacks_any_batch_is_not_whole(lost: int) -> None:
    told = list(ended(iter([batch(1, 2), batch(3)]), with_end(ROWS)))
    del told[lost]
    with pytest.raises(Unavailable, match="cut off"):
        list(checked(iter(told)))


def test_nothing_at_all_is_not_an_empty_part() -> None:
    with pytest.raises(Unavailable, match="after 0 rows"):
        list(checked(iter(())))


def test_a_column_of_the_users_with_the_same_name_stays() -> None:
    assert with_end(pa.schema([("_end", pa.string())])).names == ["_end", "__end"]
