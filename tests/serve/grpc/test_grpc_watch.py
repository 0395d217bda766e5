"""sochdb.v1.SubscriptionService over a real channel: one key watched, what is open listed and cancelled, and ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from tests.queries.open_databases import Whole
from tests.serve.grpc_calls import KV, PATIENCE, SUBSCRIPTIONS, Caller, calling
from tests.serve.server_fixture import Client, serving

from headwater.model.keys.key import encode_key

INSERT, UPDATE, DELETE = 1, 2, 3
WATCH, LIST, CANCEL = (f"{SUBSCRIPTIONS}/{name}" for name in ("WatchKey", "ListSubscriptions", "CancelSubscription"))


def op_and_values(event: Any) -> tuple[int, Any, Any]:
    """Return the operation of an event and the column `v` of both images."""
    before, after = (json.loads(data)["v"] if data else None for data in (event.before_value, event.after_value))
    return event.operation, before, after


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- one key -------------------------------------------------------------------------------------------------------


def test_watch_key_sends_only_changes_of_that_key_including_moves_in_and_out(files: Whole, caller: Caller) -> None:
    files.run("INSERT INTO t VALUES (1, 'old')")
    reader = caller.watch(table="t", key=encode_key((1,)))
    files.run("INSERT INTO t VALUES (2, 'x')")
    files.run("INSERT INTO u VALUES (1, 'x')")
    files.run("ALTER TABLE t ADD COLUMN w")  # is none of the key's
    files.run("UPDATE t SET v = 'new' WHERE k = 1")
    files.run("UPDATE t SET k = 3 WHERE k = 1")  # leaves the key
    files.run("UPDATE t SET k = 1 WHERE k = 2")  # comes to it
    files.run("DELETE FROM t")
    found = reader.take(4)
    assert [op_and_values(event) for event in found] == [
        (UPDATE, "old", "new"),
        (DELETE, "new", None),
        (INSERT, None, "x"),
        (DELETE, "x", None),
    ]
    assert [event.sequence for event in found][:3] == [7, 8, 9] and found[0].timestamp_us > 1e15


def test_key_of_a_user_table_named_kv_is_watched(files: Whole, caller: Caller) -> None:
    files.run("CREATE TABLE kv(k INTEGER PRIMARY KEY, v)")
    reader = caller.watch(table="kv", key=encode_key((1,)))
    files.run("INSERT INTO kv VALUES (2, 'x')")
    files.run("INSERT INTO kv VALUES (1, 'mine')")
    assert [op_and_values(event) for event in reader.take(1)] == [(INSERT, None, "mine")]


def test_watch_without_a_table_covers_all_tables(files: Whole, caller: Caller) -> None:
    reader = caller.watch(key=encode_key((1,)))
    files.run("INSERT INTO t VALUES (1, 't'), (2, 'x')")
    files.run("INSERT INTO u VALUES (1, 'u'), (2, 'x')")
    files.run("UPDATE t SET k = 3 WHERE k = 1")
    files.run("UPDATE u SET k = 4 WHERE k = 1")
    files.run("UPDATE u SET k = 1 WHERE k = 2")
    caller.call(f"{KV}/Put", key=encode_key((1,)), value=b'{"v": "raw"}')
    assert [op_and_values(event) for event in reader.take(6)] == [
        (INSERT, None, "t"),
        (INSERT, None, "u"),
        (DELETE, "t", None),
        (DELETE, "u", None),
        (INSERT, None, "x"),
        (INSERT, None, "raw"),
    ]


def test_watch_without_a_key_covers_the_table(files: Whole, caller: Caller) -> None:
    one, all_of_them = caller.watch(table="u"), caller.watch()
    files.run("INSERT INTO t VALUES (1, 't')")
    files.run("INSERT INTO u VALUES (7, 'u')")
    assert [op_and_values(event) for event in one.take(1)] == [(INSERT, None, "u")]
    assert [op_and_values(event) for event in all_of_them.take(2)] == [(INSERT, None, "t"), (INSERT, None, "u")]


def test_key_is_watched_before_the_table_kv_exists(caller: Caller) -> None:
    reader = caller.watch(table="kv", key=b"user:1")
    subscriber = caller.subscribe(tables=["kv"], operations=[INSERT, UPDATE, DELETE])
    caller.call(f"{KV}/Put", key=b"user:2", value=b"\xff\0")
    caller.call(f"{KV}/Put", key=b"user:1", value=b"one")
    caller.call(f"{KV}/Put", key=b"user:1", value=b"two", ttl_seconds=60)
    caller.call(f"{KV}/Delete", key=b"user:1")
    watched = [(event.operation, event.before_value, event.after_value) for event in reader.take(3)]
    assert watched == [(INSERT, b"", b"one"), (UPDATE, b"one", b"two"), (DELETE, b"two", b"")]
    events = subscriber.take(4)
    assert [event.key for event in events] == [b"user:2", b"user:1", b"user:1", b"user:1"]
    assert [(event.operation, event.before_value, event.after_value) for event in events][1:] == watched
    assert events[0].after_value == b"\xff\0"


@pytest.mark.parametrize("key", [b"not a key", encode_key((1, 2)), b"\x30text without an end"])
def test_watch_of_an_invalid_key_is_refused(caller: Caller, key: bytes) -> None:
    assert caller.refusal(WATCH, table="t", key=key).code() is grpc.StatusCode.INVALID_ARGUMENT


def test_watch_accepts_the_keys_of_events(files: Whole, caller: Caller) -> None:
    files.run("CREATE TABLE w(a TEXT COLLATE NOCASE, b REAL, c BLOB, v, PRIMARY KEY (a, b, c))")
    reader = caller.subscribe(tables=["w"])
    files.run("INSERT INTO w VALUES ('Ada', -1.5, x'00ff', 'first')")
    (event,) = reader.take(1)
    watcher = caller.watch(table="w", key=event.key)
    files.run("INSERT INTO w VALUES ('Bob', -1.5, x'00ff', 'x')")
    files.run("UPDATE w SET v = 'second' WHERE a = 'ada'")
    assert [op_and_values(each) for each in watcher.take(1)] == [(UPDATE, "first", "second")]
    files.run("CREATE TABLE n(k TEXT PRIMARY KEY, v)")
    null = caller.watch(table="n", key=encode_key((None,)))  # SQLite has such keys
    files.run("INSERT INTO n VALUES ('x', 'x'), (NULL, 'null')")
    assert [op_and_values(each) for each in null.take(1)] == [(INSERT, None, "null")]


# --- what is open --------------------------------------------------------------------------------------------------


def test_list_without_open_subscriptions_is_empty(caller: Caller) -> None:
    assert list(caller.call(LIST).subscriptions) == []


def test_open_subscription_is_listed(files: Whole, caller: Caller) -> None:
    files.create("other")
    one = caller.subscribe(tables=["t"], start_sequence=2)
    two = caller.subscribe(namespace="other")
    watching = caller.watch()
    first, second = caller.call(LIST).subscriptions
    assert (first.subscription_id, first.namespace, list(first.tables)) == ("sub-1", "main", ["t"])
    assert (first.start_sequence, first.current_sequence) == (2, 2)
    assert (second.subscription_id, second.namespace, list(second.tables)) == ("sub-2", "other", [])
    assert abs(first.created_at_us / 1e6 - time.time()) < 60
    assert [each.subscription_id for each in caller.call(LIST, namespace="other").subscriptions] == ["sub-2"]
    assert [each.subscription_id for each in caller.call(LIST, namespace="default").subscriptions] == ["sub-1"]
    assert caller.refusal(LIST, namespace="absent").code() is grpc.StatusCode.NOT_FOUND
    files.run("INSERT INTO t VALUES (1, 1)")
    one.take(1)
    until(lambda: caller.call(LIST).subscriptions[0].current_sequence == 3)
    for reader in (one, two, watching):
        reader.call.cancel()
    until(lambda: not caller.call(LIST).subscriptions)


def test_cancelled_stream_ends_without_an_error(files: Whole, caller: Caller) -> None:
    one, two = caller.subscribe(), caller.subscribe()
    answer = caller.call(CANCEL, subscription_id="sub-1")
    assert (answer.success, answer.error) == (True, "")
    assert one.rest() == [] and one.call.code() is grpc.StatusCode.OK
    assert [each.subscription_id for each in caller.call(LIST).subscriptions] == ["sub-2"]
    files.run("INSERT INTO t VALUES (1, 1)")
    assert len(two.take(1)) == 1
    again = caller.call(CANCEL, subscription_id="sub-1")
    assert (again.success, again.error) == (False, "Subscription 'sub-1' not found")


@pytest.mark.parametrize("id", ["nonexistent", "", "sub-99", "sub_0000000000000000"])
def test_unknown_subscription_is_not_cancelled(caller: Caller, id: str) -> None:
    answer = caller.call(CANCEL, subscription_id=id)
    assert (answer.success, answer.error) == (False, f"Subscription '{id}' not found")


def test_stalled_reader_is_cancelled(files: Whole, caller: Caller) -> None:
    reader = caller.subscribe()
    for _ in range(20):
        files.run("INSERT INTO t(v) VALUES (hex(zeroblob(500000)))")
    assert caller.call(CANCEL, subscription_id="sub-1").success
    assert len(reader.rest()) < 20 and reader.call.code() is grpc.StatusCode.OK


def test_disconnected_client_ends_its_stream(client: Client, files: Whole, caller: Caller) -> None:
    """SochDB polls forever for a disconnected watcher."""
    readers = [caller.watch(table="t"), caller.subscribe()]
    feeds = client.server._api.feeding()
    assert feeds.readers.count_streams()["grpc"] == 2
    for reader in readers:
        reader.call.cancel()
    until(lambda: feeds.readers.count_streams()["grpc"] == 0)


# --- ends ----------------------------------------------------------------------------------------------------------


def test_stopping_server_ends_streams_as_unavailable(files: Whole) -> None:
    with serving(files) as client, calling(client) as caller:
        readers = [caller.subscribe(), caller.watch()]
        files.run("INSERT INTO t VALUES (1, 1)")
        found = [reader.take(1) for reader in readers]
        client.loop.call_soon_threadsafe(client.server._api.feeding().readers.stop)
        failures = [reader.failure() for reader in readers]
    assert all(len(each) == 1 for each in found)
    assert {failure.code() for failure in failures} == {grpc.StatusCode.UNAVAILABLE}


def test_dropped_database_ends_its_streams(client: Client, files: Whole, caller: Caller) -> None:
    files.create("other")
    reader = caller.subscribe(namespace="other")
    client.ok("schema.drop_database", db="other")
    failure = reader.failure()
    assert failure.code() is grpc.StatusCode.NOT_FOUND and "other" in failure.details()


def test_streams_count_toward_the_limit_per_client(files: Whole) -> None:
    with (
        serving(files, max_streams_per_client=2) as client,
        calling(client) as caller,
        calling(client) as other,  # on one connection the third would only wait
    ):
        one, two = caller.subscribe(), caller.watch()
        failure = other.refusal(f"{SUBSCRIPTIONS}/Subscribe")
        assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        one.call.cancel()
        until(lambda: not other.call(LIST).subscriptions)
        three = other.subscribe()
        assert two.call.is_active() and three.call.is_active()


def test_delivered_changes_are_counted(client: Client, files: Whole, caller: Caller) -> None:
    reader = caller.subscribe()
    files.run("INSERT INTO t VALUES (1, 1), (2, 2)")
    reader.take(2)
    assert 'headwater_streams{transport="grpc"} 1.0' in client.http.get("/metrics").text
    reader.call.cancel()
    path = f"/{SUBSCRIPTIONS}/Subscribe"
    until(lambda: f'headwater_grpc_calls_total{{method="{path}",status="CANCELLED"}} 1.0' in metrics(client))
    assert 'headwater_delivered_changes_total{transport="grpc"} 2.0' in metrics(client)


def metrics(client: Client) -> str:
    return client.http.get("/metrics").text
