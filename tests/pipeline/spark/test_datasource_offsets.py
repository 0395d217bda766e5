"""How far a batch goes, and where a stream must not go on."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pipeline.fake_pull_server import TABLE

from headwater.client import Described
from headwater.errors import OffsetExpired, PipelineError, SchemaChanged
from headwater.pipeline.spark.offsets import Place, Reading, check_place, cut, next_place


def seen(latest: int, horizon: int = 1, version: int = 1, **more: Any) -> Described:
    import msgspec

    table = msgspec.structs.replace(TABLE, version=version)
    return Described(generation="g", horizon=horizon, latest=latest, table=table, version=f"g.{latest}", **more)


def at(offset: int, shape: int = 1) -> Place:
    return Place("g", offset, shape)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 100))
def test_pieces_cover_a_slice_once_and_end_at_the_same_places_however_it_is_asked(
    after: int, more: int, size: int
) -> None:
    pieces = list(cut(after, after + more, size))
    assert [n for piece in pieces for n in range(piece.after + 1, piece.upto + 1)] == [
        *range(after + 1, after + more + 1)
    ]
    assert all(piece.upto % size == 0 for piece in pieces[:-1])
    assert all(0 < piece.upto - piece.after <= size for piece in pieces)


def test_a_batch_goes_to_the_end_of_the_log() -> None:
    assert next_place(at(3), seen(10), Reading(1)) == at(10)
    assert next_place(at(10), seen(10), Reading(1)) == at(10)


@pytest.mark.parametrize(("rows", "upto"), [(1, 4), (2, 4), (10, 8), (1000, 10)])
def test_a_batch_has_at_most_so_many_rows_even_if_all_are_updates(rows: int, upto: int) -> None:
    assert next_place(at(3), seen(10), Reading(1, max_rows=rows)).offset == upto


def test_a_run_over_what_is_there_stops_where_the_log_ended_when_it_began() -> None:
    assert next_place(at(3), seen(10), Reading(1, target=7)) == at(7)
    assert next_place(at(7), seen(10), Reading(1, target=7)) == at(7)
    assert next_place(at(9), seen(10), Reading(1, target=7)) == at(9)


def test_a_log_that_ends_before_the_checkpoint_is_an_error() -> None:
    with pytest.raises(PipelineError, match="ends at offset 5, before the query's offset 6"):
        next_place(at(6), seen(5), Reading(1))


def test_a_log_that_lost_changes_is_an_error() -> None:
    check_place(at(6), seen(10, horizon=7))
    with pytest.raises(OffsetExpired):
        check_place(at(5), seen(10, horizon=7))


def test_a_log_that_began_anew_is_an_error() -> None:
    with pytest.raises(PipelineError, match="began anew") as caught:
        check_place(Place("old", 6), seen(10))
    assert caught.value.extra["resnapshot_reason"] == "log_generation_changed"


def test_a_checkpoint_of_another_source_is_an_error() -> None:
    with pytest.raises(PipelineError, match="no offset of ours"):
        Place.read({"topic": 3})
    assert Place.read(at(4, 2).told()) == at(4, 2)


def test_evolve_delivers_everything_before_the_change_then_stops() -> None:
    changed = seen(20, version=2, schema_changed_at=11)
    assert next_place(at(3), changed, Reading(1)) == at(10)
    with pytest.raises(SchemaChanged, match="from offset 11 on") as caught:
        next_place(at(10), changed, Reading(1))
    assert "Start the query again" in caught.value.hint


def test_evolve_goes_on_in_the_new_shape_after_a_restart() -> None:
    assert next_place(at(10, shape=1), seen(20, version=2), Reading(2)) == at(20, shape=2)


def test_evolve_notices_a_change_that_came_while_the_query_was_starting() -> None:
    with pytest.raises(SchemaChanged, match="has shape 2"):
        next_place(at(20), seen(20, version=2), Reading(1))


def test_pin_keeps_its_shape_and_goes_on() -> None:
    assert next_place(at(3), seen(20, version=2, schema_changed_at=11), Reading(1, "pin")) == at(20)


def test_pin_does_not_go_past_a_rebuilt_table() -> None:
    changed = seen(20, version=2, schema_changed_at=11, resnapshot=True)
    assert next_place(at(3), changed, Reading(1, "pin")) == at(10)
    with pytest.raises(SchemaChanged, match="rebuilt"):
        next_place(at(10), changed, Reading(1, "pin"))


def test_fail_stops_at_once() -> None:
    with pytest.raises(SchemaChanged, match="has shape 2, and was read as shape 1"):
        next_place(at(3), seen(20, version=2, schema_changed_at=11), Reading(1, "fail"))


@pytest.mark.parametrize("policy", ["pin", "fail"])
def test_a_restart_in_another_shape_says_how_to_keep_the_old_one(policy: str) -> None:
    with pytest.raises(SchemaChanged, match="read shape 1 .* now shape 2") as caught:
        next_place(at(3), seen(20, version=2), Reading(2, policy))
    assert "option shape to 1" in caught.value.hint


def test_changes_of_several_tables_have_no_shape() -> None:
    assert next_place(at(3, 0), seen(20, version=2), Reading(0)) == at(20, 0)
