"""Filters decide by both images: in → in is an update, out → in an insert, in → out a delete, out → out nothing.

WIRE §3 over every transport. F5–F7, F26–F30, F37, F41.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.conformance.live_server import Live

BOTH = {"before": True, "after": True}


@pytest.fixture(params=["poll", "sse", "ws", "sse replayed", "ws replayed"])
def deliver(request: pytest.FixtureRequest, server: Live) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Return a function that runs statements and returns what a subscription delivers of them, by one transport."""

    def run(sub: dict[str, Any], count: int, *statements: str) -> list[dict[str, Any]]:
        transport, _, replayed = request.param.partition(" ")
        stream = None if transport == "poll" or replayed else server.stream(transport, sub)
        for statement in statements:
            server.sql(statement)
        if transport == "poll":
            return server.changes(sub)
        stream = stream or server.stream(transport, sub)
        found = [frame.data for frame in stream.changes(count)]
        assert server.changes(sub) == found, "a poll sees the same, and no more"
        return found

    yield run


def op_key_and_totals(change: dict[str, Any]) -> tuple[Any, ...]:
    """Return op and key of a change, and `total` of both images."""
    images = [change[image]["total"] if image in change else None for image in ("before", "after")]
    return (change["op"], change["pk"][0], *images, *change.get("pk_before", ()))


def test_row_that_enters_stays_in_or_leaves_the_filter_is_insert_update_or_delete(
    server: Live, table: str, deliver: Callable[..., Any]
) -> None:
    sub = server.subscribe(table, where="total > 100", include=BOTH)
    found = deliver(
        sub,
        5,
        f"INSERT INTO {table} VALUES(1, 'a', 50), (2, 'b', 500)",
        f"UPDATE {table} SET total = 60 WHERE id = 1",  # out → out
        f"UPDATE {table} SET total = 600 WHERE id = 2",  # in → in
        f"UPDATE {table} SET total = 200 WHERE id = 1",  # out → in
        f"UPDATE {table} SET total = 10 WHERE id = 2",  # in → out
        f"DELETE FROM {table}",  # 1 is inside, 2 is not
    )
    assert [op_key_and_totals(change) for change in found] == [
        ("insert", 2, None, 500),
        ("update", 2, 500, 600),
        ("insert", 1, None, 200),
        ("delete", 2, 600, None),
        ("delete", 1, 200, None),
    ]


def test_row_with_null_in_the_predicate_is_outside_the_filter(
    server: Live, table: str, deliver: Callable[..., Any]
) -> None:
    sub = server.subscribe(table, where="total > 100", include=BOTH)
    found = deliver(
        sub,
        2,
        f"INSERT INTO {table} VALUES(1, 'a', 500)",
        f"UPDATE {table} SET total = NULL",
        f"DELETE FROM {table}",
    )
    assert [op_key_and_totals(change) for change in found] == [("insert", 1, None, 500), ("delete", 1, 500, None)]


def test_key_change_across_a_key_range_is_delivered_as_insert_or_delete(
    server: Live, table: str, deliver: Callable[..., Any]
) -> None:
    bounds = {"lower_bound": {"t": "i64", "v": 1}, "upper_bound": {"t": "i64", "v": 10}}
    sub = server.subscribe(table, pk_range=bounds, include=BOTH)
    found = deliver(
        sub,
        4,
        f"INSERT INTO {table} VALUES(1, 'a', 1), (20, 'b', 2)",
        f"UPDATE {table} SET id = 2 WHERE id = 1",  # in → in, under another key
        f"UPDATE {table} SET id = 21 WHERE id = 20",  # out → out
        f"UPDATE {table} SET id = 3 WHERE id = 21",  # out → in
        f"UPDATE {table} SET id = 30 WHERE id = 2",  # in → out
    )
    assert [op_key_and_totals(change) for change in found] == [
        ("insert", 1, None, 1),
        ("update", 2, 1, 1, 1),
        ("insert", 3, None, 2),
        ("delete", 2, 1, None),
    ]


def test_ops_filter_applies_to_the_delivered_op(server: Live, table: str, deliver: Callable[..., Any]) -> None:
    sub = server.subscribe(table, where="total > 100", ops=["delete"], include=BOTH)
    found = deliver(
        sub,
        2,
        f"INSERT INTO {table} VALUES(1, 'a', 500), (2, 'b', 5)",
        f"UPDATE {table} SET total = total / 10",  # 1 leaves
        f"UPDATE {table} SET total = 300 WHERE id = 2",
        f"DELETE FROM {table}",  # 2 leaves, 1 was outside
    )
    assert [op_key_and_totals(change) for change in found] == [("delete", 1, 500, None), ("delete", 2, 300, None)]


def test_image_of_a_row_outside_the_filter_is_withheld(server: Live, table: str) -> None:
    sub = server.subscribe(table, where="status = 'open'", include=BOTH, format="objects_json")
    server.sql(f"INSERT INTO {table} VALUES(1, 'secret', 1)")
    server.sql(f"UPDATE {table} SET status = 'open'")
    server.sql(f"UPDATE {table} SET status = 'secret again'")
    assert "secret" not in str(server.changes(sub))


def test_key_change_passes_a_columns_filter(server: Live, table: str) -> None:
    sub = server.subscribe(table, columns=["status"], include=BOTH)
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1)")
    server.sql(f"UPDATE {table} SET id = 2, total = 5")
    _, moved = server.changes(sub)
    assert (moved["op"], moved["pk"], moved["pk_before"]) == ("update", [2], [1])
    assert moved["before"] == moved["after"] == {"status": "a"}
