"""The end of a batch, and checkpoints from which a stream must not continue."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from pyspark.sql.types import StructType
from tests.pipeline.fake_pull_server import TABLE

from headwater.client import Described
from headwater.errors import OffsetExpired, PipelineError, SchemaChanged
from headwater.pipeline.spark.datasource import BatchReader
from headwater.pipeline.spark.offsets import (
    StreamOffset,
    StreamParameters,
    check_offset,
    check_types,
    next_offset,
    split_log,
)
from headwater.pipeline.spark.options import parse


def log_status(latest: int, horizon: int = 1, version: int = 1, **more: Any) -> Described:
    """Return the status of a table's log, as `pull.describe` returns it."""
    table, more = replace(TABLE, version=version), {"table_latest": latest} | more
    return Described(generation="g", horizon=horizon, latest=latest, table=table, version=f"g.{latest}", **more)


def at(offset: int, shape: int = 1) -> StreamOffset:
    return StreamOffset("g", offset, shape)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 100))
def test_pieces_of_a_slice_cover_it_once_and_end_at_multiples_of_their_size(after: int, more: int, size: int) -> None:
    pieces = list(split_log(after, after + more, size))
    assert [n for piece in pieces for n in range(piece.after + 1, piece.upto + 1)] == [
        *range(after + 1, after + more + 1)
    ]
    assert all(piece.upto % size == 0 for piece in pieces[:-1])
    assert all(0 < piece.upto - piece.after <= size for piece in pieces)


def test_batch_ends_at_the_end_of_the_log() -> None:
    assert next_offset(at(3), log_status(10), StreamParameters(1)) == at(10)
    assert next_offset(at(10), log_status(10), StreamParameters(1)) == at(10)


@pytest.mark.parametrize(("rows", "upto"), [(1, 4), (2, 4), (10, 8), (1000, 10)])
def test_batch_of_updates_respects_the_row_limit(rows: int, upto: int) -> None:
    assert next_offset(at(3), log_status(10), StreamParameters(1, max_rows=rows)).offset == upto


def test_batch_ends_where_the_server_ends_a_step_of_the_table() -> None:
    log = replace(log_status(1000), step_upto=700)
    assert next_offset(at(3), log, StreamParameters(1, max_rows=10)) == at(700)
    assert next_offset(at(3), log, StreamParameters(1, max_rows=10, target=600)) == at(600)


def test_changes_of_other_tables_make_no_batch_until_the_horizon_is_near() -> None:
    log = replace(log_status(1000), table_latest=3)
    assert next_offset(at(3), log, StreamParameters(1)) == at(3)
    assert next_offset(at(800), replace(log, horizon=400), StreamParameters(1)) == at(800)
    assert next_offset(at(600), replace(log, horizon=550), StreamParameters(1)) == at(1000)


def test_run_with_a_target_offset_stops_at_the_target() -> None:
    assert next_offset(at(3), log_status(10), StreamParameters(1, target=7)) == at(7)
    assert next_offset(at(7), log_status(10), StreamParameters(1, target=7)) == at(7)
    assert next_offset(at(9), log_status(10), StreamParameters(1, target=7)) == at(9)


def test_checkpoint_beyond_the_end_of_the_log_is_refused() -> None:
    with pytest.raises(PipelineError, match="ends at offset 5, before the query's offset 6"):
        next_offset(at(6), log_status(5), StreamParameters(1))


def test_checkpoint_below_the_log_horizon_raises_offset_expired() -> None:
    check_offset(at(6), log_status(10, horizon=7))
    with pytest.raises(OffsetExpired):
        check_offset(at(5), log_status(10, horizon=7))


def test_checkpoint_of_an_older_log_generation_is_refused() -> None:
    with pytest.raises(PipelineError, match="began the new generation") as caught:
        check_offset(StreamOffset("old", 6), log_status(10))
    assert caught.value.extra["resnapshot_reason"] == "log_generation_changed"


def test_checkpoint_of_another_source_is_refused() -> None:
    with pytest.raises(PipelineError, match="no offset of Headwater"):
        StreamOffset.read({"topic": 3})
    assert StreamOffset.read(at(4, 2).to_json()) == at(4, 2)


def test_policy_evolve_delivers_all_changes_before_a_schema_change_then_stops() -> None:
    changed = log_status(20, version=2, schema_changed_at=11)
    assert next_offset(at(3), changed, StreamParameters(1)) == at(10)
    with pytest.raises(SchemaChanged, match="from offset 11 on") as caught:
        next_offset(at(10), changed, StreamParameters(1))
    assert "Start the query again" in caught.value.hint


def test_policy_evolve_continues_in_the_new_schema_after_a_restart() -> None:
    assert next_offset(at(10, shape=1), log_status(20, version=2), StreamParameters(2)) == at(20, shape=2)


def test_policy_evolve_detects_a_schema_change_during_query_start() -> None:
    with pytest.raises(SchemaChanged, match="has shape 2"):
        next_offset(at(20), log_status(20, version=2), StreamParameters(1))


def test_policy_pin_continues_with_its_old_schema() -> None:
    assert next_offset(at(3), log_status(20, version=2, schema_changed_at=11), StreamParameters(1, "pin")) == at(20)


def test_policy_pin_stops_at_a_rebuilt_table() -> None:
    changed = log_status(20, version=2, schema_changed_at=11, resnapshot=True)
    assert next_offset(at(3), changed, StreamParameters(1, "pin")) == at(10)
    with pytest.raises(SchemaChanged, match="rebuilt"):
        next_offset(at(10), changed, StreamParameters(1, "pin"))


def test_policy_fail_stops_at_a_schema_change() -> None:
    with pytest.raises(SchemaChanged, match="has shape 2, and was read as shape 1"):
        next_offset(at(3), log_status(20, version=2, schema_changed_at=11), StreamParameters(1, "fail"))


@pytest.mark.parametrize("policy", ["pin", "fail"])
def test_restart_in_another_schema_is_refused_with_a_hint_to_the_shape_option(policy: str) -> None:
    with pytest.raises(SchemaChanged, match="read shape 1 .* now shape 2") as caught:
        next_offset(at(3), log_status(20, version=2), StreamParameters(2, policy))
    assert "option shape to 1" in caught.value.hint


def test_changes_of_several_tables_ignore_schema_changes() -> None:
    assert next_offset(at(3, 0), log_status(20, version=2), StreamParameters(0)) == at(20, 0)


def test_checkpoint_of_another_form_of_types_is_refused_with_both_forms() -> None:
    old = StreamOffset.read({"generation": "g", "offset": 3, "shape": 1})  # from before there was a choice
    with pytest.raises(SchemaChanged, match="types = text so far, and now with types = typed") as refused:
        next_offset(old, log_status(10), StreamParameters(1, types="typed"))
    assert "types to text" in refused.value.hint
    same = StreamParameters(1, types="typed", has_forms=False)  # no column of the table is a decimal, date or time
    assert next_offset(old, log_status(10), same) == StreamOffset("g", 10, 1, "typed")
    typed = StreamOffset("g", 3, 1, "typed")
    assert StreamOffset.read(typed.to_json()) == typed
    assert next_offset(typed, log_status(10), StreamParameters(1, types="typed")) == StreamOffset("g", 10, 1, "typed")
    with pytest.raises(SchemaChanged, match="types = typed so far"):
        check_types(typed, StreamParameters(1))


def test_batch_read_plans_no_task_for_changes_of_other_tables() -> None:
    log = replace(log_status(1_000_000), table_latest=70_000)
    options = {"url": "http://127.0.0.1:1", "table": "t", "after": "0"}
    planned = [
        BatchReader(parse({**options, "after": after}), log, StructType()).partitions() for after in ("0", "70000")
    ]
    assert [[(task.what.after, task.what.upto) for task in tasks] for tasks in planned] == [
        [(0, 65_536), (65_536, 70_000)],
        [],
    ]
