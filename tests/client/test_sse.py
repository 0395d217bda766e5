"""Server-sent events: pieces to frames, and a feed that resumes where it broke."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.client.retry import Backoff
from headwater.client.sse import EventParser, Feed, Follow, Frame
from headwater.errors import HeadwaterError, InvalidRequest, OffsetExpired, Unavailable
from headwater.serve.http import transport_frames

OPENING = transport_frames.sse_opening(2)
BODY = b"".join(
    [
        OPENING,
        transport_frames.sse(3, "insert", b'{"offset":3}'),
        transport_frames.SSE_PING,
        transport_frames.sse("s:abc", "insert", '{"name":"ü"}'.encode()),
        transport_frames.sse(4, "caught_up", b'{"offset":4}'),
        transport_frames.SSE_FAREWELL,
    ]
)
FRAMES = [
    Frame("2", "", b""),
    Frame("3", "insert", b'{"offset":3}'),
    Frame("s:abc", "insert", '{"name":"ü"}'.encode()),
    Frame("4", "caught_up", b'{"offset":4}'),
]


@given(st.lists(st.integers(0, len(BODY)), max_size=12))
def test_body_fed_in_arbitrary_pieces_is_parsed_completely(cuts: list[int]) -> None:
    parser, edges = EventParser(), [0, *sorted(cuts), len(BODY)]
    found = [frame for low, high in zip(edges, edges[1:], strict=False) for frame in parser.take(BODY[low:high])]
    assert found == FRAMES
    assert parser.farewell


def test_sse_comment_that_ends_a_stream_is_distinguished_from_the_opening_one() -> None:
    parser = EventParser()
    parser.take(transport_frames.sse_opening(None) + transport_frames.sse(1, "insert", b"{}"))
    assert not parser.farewell
    parser.take(transport_frames.SSE_FAREWELL)
    assert parser.farewell


# --- a feed ----------------------------------------------------------------------------------------------


def feed(control: tuple[str, ...] = (), **query: Any) -> Feed:
    return Feed(["changes", "main", "t"], query, Backoff(60, random.Random(0), lambda: 0.0), control)


def next_query(one: Feed) -> tuple[str, str]:
    """Return the query string and the Last-Event-ID of the feed's next request."""
    request = one.next()
    assert request is not None
    return request.path.partition("?")[2], request.headers.get("last-event-id", "")


def test_resumed_feed_sends_its_last_id_instead_of_its_first_offset() -> None:
    one = feed(from_offset=2, where="a > 1")
    assert next_query(one) == ("from_offset=2&where=a+%3E+1", "")
    assert list(one.take(BODY[: BODY.index(b"id: s:")])) == [{"offset": 3}]
    one.failed(Unavailable("cut", sent=True))
    assert next_query(one) == ("where=a+%3E+1", "3")


def test_incomplete_frame_is_discarded_with_its_connection() -> None:
    one = feed()
    next_query(one)
    half = transport_frames.sse(9, "insert", b'{"offset":9}')[:-1]
    assert list(one.take(OPENING + half)) == []
    assert next_query(one)[1] == "2"
    assert list(one.take(transport_frames.sse(5, "insert", b'{"offset":5}'))) == [{"offset": 5}]


def test_control_events_are_delivered_on_request_and_snapshot_events_always() -> None:
    body = b"".join(
        transport_frames.sse(1, word, b"{}") for word in ("checkpoint", "caught_up", "snapshot_end", "snapshot_restart")
    )
    quiet, told = feed(), feed(("checkpoint",))
    next_query(quiet)
    next_query(told)
    assert [one["event"] for one in quiet.take(body)] == ["snapshot_end", "snapshot_restart"]
    assert [one["event"] for one in told.take(body)] == ["checkpoint", "snapshot_end", "snapshot_restart"]


def test_changes_before_a_feed_error_are_delivered_first() -> None:
    one = feed()
    next_query(one)
    gone = transport_frames.sse(
        6, "resnapshot", b'{"earliest_offset":7,"latest_offset":9,"reason":"wal_horizon_exceeded"}'
    )
    got = one.take(transport_frames.sse(3, "insert", b'{"offset":3}') + gone)
    assert next(got) == {"offset": 3}
    with pytest.raises(OffsetExpired) as raised:
        next(got)
    assert raised.value.extra["resnapshot_reason"] == "wal_horizon_exceeded"
    with pytest.raises(OffsetExpired):
        one.failed(raised.value)


def test_failed_event_is_raised_with_its_error_class() -> None:
    one = feed()
    next_query(one)
    told = b'{"code":"invalid_request","message":"no such column","details":{"hint":"Name another."}}'
    with pytest.raises(InvalidRequest, match="no such column") as raised:
        list(one.take(transport_frames.sse(3, "failed", told)))
    assert raised.value.hint == "Name another."


def test_feed_with_upto_ends_at_that_offset() -> None:
    one = feed(upto=3)
    next_query(one)
    list(one.take(OPENING + transport_frames.sse(3, "insert", b"{}")))
    one.finished()
    assert one.next() is None


def test_feed_ended_before_upto_is_requested_again_until_complete() -> None:
    one = feed(upto=9)
    next_query(one)
    list(one.take(OPENING + transport_frames.sse(3, "insert", b"{}")))
    one.finished()
    assert next_query(one) == ("upto=9", "3")
    list(one.take(transport_frames.SSE_OPENING + b"id: 3\n\n"))
    one.finished()
    assert one.next() is None


def test_farewell_before_upto_is_followed_by_another_request() -> None:
    one = feed(upto=9)
    next_query(one)
    list(one.take(OPENING + transport_frames.SSE_FAREWELL))
    one.finished()
    assert one.next() is not None


def test_feed_without_upto_is_requested_again_after_every_end() -> None:
    one = feed()
    next_query(one)
    one.finished()
    assert one.next() is not None


def test_ping_resets_the_patience_of_a_feed_and_an_opening_comment_does_not() -> None:
    now = [0.0]
    one = Feed(["changes"], {}, Backoff(20, random.Random(0), lambda: now[0]))
    for _ in range(9):  # a server that dies as soon as it was asked
        next_query(one)
        list(one.take(transport_frames.SSE_OPENING))
        one.failed(Unavailable("cut", sent=True))
        now[0] += 1
    next_query(one)
    list(one.take(transport_frames.SSE_OPENING))
    list(one.take(transport_frames.SSE_PING))
    now[0] += 15
    one.failed(Unavailable("cut", sent=True))
    now[0] += 20
    with pytest.raises(HeadwaterError):
        one.failed(Unavailable("cut", sent=True))


# --- rows, then changes ----------------------------------------------------------------------------------


def following(**filters: Any) -> Follow:
    return Follow(feed, filters, Backoff(60, random.Random(0), lambda: 0.0))


def test_follow_names_rows_restarts_and_changes_by_different_event_words() -> None:
    follow = following()
    follow.next()
    body = b"".join(
        [
            transport_frames.sse("s:a", "insert", b'{"op":"insert","snapshot":true,"after":{"id":1}}'),
            transport_frames.sse("s:x", "snapshot_restart", b'{"reason":"snapshot_expired"}'),
            transport_frames.sse("s:b", "insert", b'{"op":"insert","snapshot":true,"after":{"id":2}}'),
            transport_frames.sse(3, "snapshot_end", b'{"rows":1}'),
            transport_frames.sse(4, "schema_change", b'{"op":"schema_change","resnapshot":false}'),
        ]
    )
    change = {"op": "schema_change", "resnapshot": False}
    rows = [("row", {"id": 1}), ("resnapshot", "snapshot_expired"), ("row", {"id": 2})]
    assert list(follow.take(body)) == [*rows, ("change", change)]
    assert list(follow.rest()) == []


def test_schema_change_with_resnapshot_makes_follow_read_the_rows_again() -> None:
    follow = following()
    follow.next()
    got = follow.take(transport_frames.sse(4, "schema_change", b'{"op":"schema_change","resnapshot":true}'))
    assert next(got) == ("change", {"op": "schema_change", "resnapshot": True})
    with pytest.raises(OffsetExpired) as raised:
        next(got)
    assert follow.failed(raised.value) == 0.0
    assert list(follow.rest()) == [("resnapshot", "schema_changed")]
    assert list(follow.rest()) == []
    request = follow.next()
    assert request is not None and "last-event-id" not in request.headers


def test_expired_offset_makes_follow_read_the_rows_again_after_a_wait() -> None:
    follow = following()
    follow.next()
    assert follow.failed(OffsetExpired(1, 2, 3)) > 0
    assert list(follow.rest()) == [("resnapshot", OffsetExpired.code)]


@pytest.mark.parametrize("filters", [{"upto": 4}, {"upto": None}, {"format": "debezium_json"}])
def test_follow_with_a_reserved_filter_is_refused(filters: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        following(**filters).next()
