"""sochdb.v1.SubscriptionService over a real channel: what a subscriber sees, and from where on."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.queries.open_databases import Whole
from tests.serve.grpc_calls import SUBSCRIPTIONS, Caller, calling
from tests.serve.server_fixture import Client, serving
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.config import LogConfig
from headwater.model.keys.key import encode_key

INSERT, UPDATE, DELETE, SCHEMA_CHANGE = 1, 2, 3, 4
SUBSCRIBE = f"{SUBSCRIPTIONS}/Subscribe"


def image(data: bytes) -> Any:
    return json.loads(data) if data else None


def short(event: Any) -> tuple[int, str, Any, Any]:
    """Return operation, table and images of an event."""
    return event.operation, event.table, image(event.before_value), image(event.after_value)


def test_change_event_has_both_images(files: Whole, caller: Caller) -> None:
    reader, began = caller.subscribe(), time.time()
    files.run("INSERT INTO t VALUES (1, 'a')")
    files.run("UPDATE t SET v = 'b'")
    files.run("DELETE FROM t")
    found = reader.take(3)
    assert [short(event) for event in found] == [
        (INSERT, "t", None, {"k": 1, "v": "a"}),
        (UPDATE, "t", {"k": 1, "v": "a"}, {"k": 1, "v": "b"}),
        (DELETE, "t", {"k": 1, "v": "b"}, None),
    ]
    assert [event.sequence for event in found] == [3, 4, 5]
    assert {event.key for event in found} == {encode_key((1,))}
    assert all(abs(event.timestamp_us / 1e6 - began) < 60 for event in found)
    assert any(event.timestamp_us % 1000 for event in found), "once in a billion runs all three are whole milliseconds"
    assert not any(event.ddl or event.before_key or event.unavailable for event in found)


def test_changes_of_one_transaction_share_its_id(files: Whole, caller: Caller) -> None:
    reader = caller.subscribe()
    files.run("INSERT INTO t VALUES (1, 1), (2, 2)")
    files.run("INSERT INTO t VALUES (3, 3)")
    one, two, three = (event.txn_id for event in reader.take(3))
    assert one == two != three and one > 0


def test_uncommitted_and_rolled_back_changes_are_not_sent(client: Client, caller: Caller) -> None:
    reader = caller.subscribe()
    for end in ("tx.rollback", "tx.commit"):
        tx = client.ok("tx.begin")["tx_id"]
        client.ok("sql.exec", sql=f"INSERT INTO t VALUES ({len(end)}, '{end}')", tx=tx)
        client.ok(end, tx_id=tx)
    (found,) = reader.take(1)
    assert image(found.after_value)["v"] == "tx.commit"
    assert found.sequence == 3  # what was rolled back took no number


def test_concurrent_writers_leave_no_gaps_in_sequences(client: Client, files: Whole, caller: Caller) -> None:
    """SochDB numbers rows when they are written, so concurrent commits arrive out of order."""
    reader = caller.subscribe()

    def write(name: int) -> None:
        for number in range(250):
            files.run(f"INSERT INTO t(v) VALUES ('{name}.{number}')")

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    found = reader.take(1000)
    for thread in threads:
        thread.join()
    assert [event.sequence for event in found] == list(range(3, 1003))
    assert len({event.txn_id for event in found}) == 1000


def test_schema_change_event_has_its_ddl(files: Whole, caller: Caller) -> None:
    reader = caller.subscribe()
    files.run("ALTER TABLE t ADD COLUMN w")
    files.run("INSERT INTO t VALUES (1, 2, 3)")
    ddl, row = reader.take(2)
    assert (ddl.operation, ddl.table, ddl.key, ddl.after_value, ddl.before_value) == (SCHEMA_CHANGE, "t", b"", b"", b"")
    assert ddl.ddl == "ALTER TABLE t ADD COLUMN w"
    assert image(row.after_value) == {"k": 1, "v": 2, "w": 3}


def test_update_of_a_key_reports_the_old_key(files: Whole, caller: Caller) -> None:
    files.run("INSERT INTO t VALUES (1, 2)")
    reader = caller.subscribe()
    files.run("UPDATE t SET k = 9")
    (found,) = reader.take(1)
    assert (found.operation, found.key, found.before_key) == (UPDATE, encode_key((9,)), encode_key((1,)))


# --- from where on -------------------------------------------------------------------------------------------------


def test_start_sequence_zero_sends_only_new_changes(files: Whole, caller: Caller) -> None:
    files.run("INSERT INTO t VALUES (1, 'old')")
    reader = caller.subscribe(start_sequence=0)
    files.run("INSERT INTO t VALUES (2, 'new')")
    assert [image(event.after_value)["v"] for event in reader.take(1)] == ["new"]


@pytest.mark.parametrize("start", [1, 3, 5, 6])
def test_start_sequence_is_the_first_one_delivered(files: Whole, caller: Caller, start: int) -> None:
    """SochDB begins with the next sequence, so a client that follows its documentation loses one."""
    files.run("INSERT INTO t VALUES (1, 1), (2, 2), (3, 3)")
    reader = caller.subscribe(start_sequence=start)
    files.run("INSERT INTO t VALUES (4, 4)")
    assert [event.sequence for event in reader.take(7 - start)] == list(range(start, 7))


@pytest.mark.parametrize("start", [4, 2**62, 2**64 - 1])
def test_start_sequence_ahead_of_the_log_is_refused(caller: Caller, start: int) -> None:
    failure = caller.refusal(SUBSCRIBE, start_sequence=start)
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.details() == f"start_sequence {start} is beyond the latest sequence 2"
    assert "offset" not in dict(failure.trailing_metadata())["headwater-hint"].lower()


def test_evicted_start_sequence_is_an_overrun(tmp_path: Path) -> None:
    """SochDB takes the overrun for a timeout and retries forever."""
    with (
        Whole(tmp_path, log=LogConfig(flush_ms=5, retention_events=3)) as files,
        serving(files) as client,
        calling(client) as caller,
    ):
        files.run("CREATE TABLE t(k INTEGER PRIMARY KEY)")
        for key in range(4):
            files.run(f"INSERT INTO t VALUES ({key})")
        assert files.database("main").catch_up(PATIENCE)
        files.database("main").log.flush()
        failure = caller.refusal(SUBSCRIBE, start_sequence=1)
        assert failure.code() is grpc.StatusCode.OUT_OF_RANGE
        assert failure.details() == "CDC overrun: requested seq 1 but oldest available is 3"
        trailers = dict(failure.trailing_metadata())
        assert trailers["oldest-available"] == "3" and trailers["headwater-code"] == "resnapshot_required"
        assert [event.sequence for event in caller.subscribe(start_sequence=3).take(3)] == [3, 4, 5]


def test_slow_subscriber_receives_an_overrun(tmp_path: Path) -> None:
    with (
        Whole(tmp_path, log=LogConfig(flush_ms=5, retention_events=3)) as files,
        serving(files) as client,
        calling(client) as caller,
    ):
        files.run("CREATE TABLE t(k INTEGER PRIMARY KEY, v)")
        reader = caller.subscribe()
        for _ in range(60):  # more than all buffers between the two hold
            files.run("INSERT INTO t(v) VALUES (hex(zeroblob(500000)))")
        failure = reader.failure()
        assert failure.code() is grpc.StatusCode.OUT_OF_RANGE
        assert failure.details().startswith("CDC overrun: requested seq ")


def test_idle_stream_stays_open(files: Whole, caller: Caller) -> None:
    """Nothing is sent while nothing changes; the reader decides how long to wait."""
    call = caller.channel.unary_stream(f"/{SUBSCRIBE}")(b"", timeout=0.3)
    with pytest.raises(grpc.RpcError) as failure:
        next(call)
    assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    reader = caller.subscribe()
    files.run("INSERT INTO t VALUES (1, 1)")
    assert len(reader.take(1)) == 1


# --- which changes -------------------------------------------------------------------------------------------------


def test_subscription_of_a_table_gets_only_its_changes(files: Whole, caller: Caller) -> None:
    one, both = caller.subscribe(tables=["u"]), caller.subscribe(tables=["u", "t"])
    files.run("INSERT INTO t VALUES (1, 1)")
    files.run("INSERT INTO u VALUES (2, 2)")
    assert [event.table for event in one.take(1)] == ["u"]
    assert [event.table for event in both.take(2)] == ["t", "u"]


def test_batch_without_matching_changes_is_skipped(files: Whole, caller: Caller) -> None:
    """SochDB advances only past matches: it reads a batch without matches again forever."""
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2000)"
    files.run(f"{numbers} INSERT INTO t SELECT i, i FROM n")
    files.run("INSERT INTO u VALUES (1, 'here')")
    for size in (0, 1, 64, 2**32 - 1):
        (found,) = caller.subscribe(tables=["u"], start_sequence=3, batch_size=size).take(1)
        assert found.sequence == 2003, size


def test_filter_without_matches_is_not_evicted_from_a_busy_log(tmp_path: Path) -> None:
    with (
        Whole(tmp_path, log=LogConfig(flush_ms=5, retention_events=20)) as files,
        serving(files) as client,
        calling(client) as caller,
    ):
        files.run("CREATE TABLE t(k INTEGER PRIMARY KEY)")
        files.run("CREATE TABLE u(k INTEGER PRIMARY KEY)")
        reader = caller.subscribe(tables=["u"])
        (stream,) = client.server._api.feeding().readers.streams
        log, hub = files.database("main").log, stream.consumer.hub
        for key in range(100):
            files.run(f"INSERT INTO t VALUES ({key})")
            if key % 10 == 9:  # fewer than the log retains: the stream may be held up
                assert files.database("main").catch_up(PATIENCE)
                wait_until(lambda: stream._live is not None and hub.upto >= log.latest, "the changes were skipped")
        assert log.horizon > 80
        files.run("INSERT INTO u VALUES (1)")
        assert [event.table for event in reader.take(1)] == ["u"]


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ([], [SCHEMA_CHANGE, INSERT, UPDATE, DELETE]),
        ([INSERT], [INSERT]),
        ([UPDATE], [UPDATE]),
        ([DELETE, DELETE], [DELETE]),
        ([SCHEMA_CHANGE], [SCHEMA_CHANGE]),
        ([DELETE, INSERT], [INSERT, DELETE]),
    ],
)
def test_subscription_delivers_only_the_requested_operations(
    files: Whole, caller: Caller, asked: list[int], wanted: list[int]
) -> None:
    reader = caller.subscribe(tables=["t"], operations=asked)
    files.run("ALTER TABLE t ADD COLUMN w")
    files.run("INSERT INTO t VALUES (1, 2, 3)")
    files.run("UPDATE t SET v = 9")
    files.run("DELETE FROM t")
    assert [event.operation for event in reader.take(len(wanted))] == wanted


@pytest.mark.parametrize("odd", [0, 5, -1, 2**31 - 1])
def test_unknown_operation_is_refused(caller: Caller, odd: int) -> None:
    """SochDB drops unknown operations, and delivers everything if none is left."""
    failure = caller.refusal(SUBSCRIBE, operations=[INSERT, odd])
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(odd) in failure.details()


def test_predicate_filters_changes(files: Whole, caller: Caller) -> None:
    """SochDB accepts a predicate and delivers everything."""
    reader = caller.subscribe(tables=["t"], where_predicate="v > 10")
    files.run("INSERT INTO t VALUES (1, 5)")
    files.run("UPDATE t SET v = 20")  # comes in
    files.run("UPDATE t SET v = 30")
    files.run("UPDATE t SET v = 1")  # goes out
    files.run("INSERT INTO t VALUES (2, 11)")
    assert [short(event) for event in reader.take(4)] == [
        (INSERT, "t", None, {"k": 1, "v": 20}),
        (UPDATE, "t", {"k": 1, "v": 20}, {"k": 1, "v": 30}),
        (DELETE, "t", {"k": 1, "v": 30}, None),
        (INSERT, "t", None, {"k": 2, "v": 11}),
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"tables": ["t"], "where_predicate": "v >"},
        {"tables": ["t"], "where_predicate": "nothing = 1"},
        {"tables": ["t"], "where_predicate": "v = random()"},
        {"tables": ["t"], "where_predicate": "v IN (SELECT v FROM u)"},
        {"tables": ["t"], "where_predicate": "  "},
        {"tables": ["t", "u"], "where_predicate": "v > 1"},
        {"where_predicate": "v > 1"},
    ],
)
def test_unsupported_predicate_is_refused(caller: Caller, fields: dict[str, Any]) -> None:
    failure = caller.refusal(SUBSCRIBE, **fields)
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "`where_predicate`" in failure.details()
    if len(fields.get("tables", ())) != 1:
        assert "`tables`" in dict(failure.trailing_metadata())["headwater-hint"]


def test_dropped_column_of_a_predicate_ends_the_stream(files: Whole, caller: Caller) -> None:
    reader = caller.subscribe(tables=["t"], where_predicate="v > 1")
    files.run("ALTER TABLE t RENAME COLUMN v TO w")
    files.run("INSERT INTO t VALUES (1, 2)")
    failure = reader.failure()
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT and "does not fit" in failure.details()


def test_namespace_gets_only_its_own_changes(files: Whole, caller: Caller) -> None:
    """SochDB stores the namespace and delivers the changes of all namespaces."""
    files.create("other")
    files.run("CREATE TABLE t(k INTEGER PRIMARY KEY, v)", db="other")
    readers = {name: caller.subscribe(namespace=name) for name in ("", "default", "main", "other")}
    files.run("INSERT INTO t VALUES (1, 'other')", db="other")
    files.run("INSERT INTO t VALUES (1, 'main')")
    for name, reader in readers.items():
        (found,) = reader.take(1)
        assert image(found.after_value)["v"] == ("other" if name == "other" else "main"), name


@pytest.mark.parametrize("fields", [{"namespace": "absent"}, {"tables": ["absent"]}])
def test_unknown_namespace_or_table_is_not_found(caller: Caller, fields: dict[str, Any]) -> None:
    assert caller.refusal(SUBSCRIBE, **fields).code() is grpc.StatusCode.NOT_FOUND


def test_streams_of_one_shape_share_their_encoding(client: Client, files: Whole, caller: Caller) -> None:
    readers = [caller.subscribe(tables=["t"]) for _ in range(20)]
    files.run("INSERT INTO t VALUES (1, 1), (2, 2)")
    assert {tuple(event.SerializeToString() for event in reader.take(2)) for reader in readers} == {
        tuple(event.SerializeToString() for event in caller.subscribe(start_sequence=3).take(2))
    }
    feeds = client.server._api.feeding()
    assert feeds.readers.count_streams()["grpc"] >= 20
    (group,) = {stream._group for stream in feeds.readers.streams if stream.consumer.view.options.tables}  # type: ignore[union-attr]
    assert group.members == 20


@pytest.mark.parametrize("named", [{"tables": ["t"] * 1001}, {"operations": [1] * 1001}])
def test_subscription_that_names_more_than_1000_is_refused(caller: Caller, named: dict[str, Any]) -> None:
    failure = caller.refusal(f"{SUBSCRIPTIONS}/Subscribe", **named)
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT and "1000" in failure.details()


def test_table_that_is_named_twice_is_kept_once(caller: Caller) -> None:
    reader = caller.subscribe(tables=["t"] * 1000)
    (found,) = caller.call(f"{SUBSCRIPTIONS}/ListSubscriptions").subscriptions
    assert list(found.tables) == ["t"]
    reader.call.cancel()
