"""headwater.v1.ChangeFeedService over a real channel: events, checkpoints, and every way a feed ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.queries.open_databases import Whole
from tests.serve.changefeeds import Feed, at, kinds, own_message, row, span, values
from tests.serve.grpc_calls import calling
from tests.serve.server_fixture import Client, serving
from tests.suite.deadlines import PATIENCE

from headwater.config import FeedsConfig, LogConfig
from headwater.model.keys.key import encode_key
from headwater.ranges.changefeed.changefeed import FeedTiming
from headwater.serve.grpc import changefeed as changefeed_module
from headwater.serve.grpc.messages import message

KEY = {k: encode_key((k,)) for k in range(120)}
QUICK = 100  # milliseconds between two checkpoints


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Whole]:
    settings = {"log": LogConfig(flush_ms=5, retention_events=200), "feeds": FeedsConfig(checkpoint_seconds=0.1)}
    with Whole(tmp_path / "data", **settings) as found:
        found.run("CREATE TABLE t(k INTEGER PRIMARY KEY, v)")
        found.run("CREATE TABLE u(k INTEGER PRIMARY KEY, v)")
        yield found


@pytest.fixture
def channel(client: Client) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(client.server.grpc_address) as found:
        yield found


def head(files: Whole) -> int:
    """Wait until every commit is durable in the log; return its newest offset."""
    assert files.database("main").catch_up(PATIENCE)
    return files.database("main").log.flush()


def now(channel: grpc.Channel) -> Any:
    """Return a checkpoint of the current time."""
    with Feed(channel) as feed:
        return feed.upto("checkpoint")[-1].checkpoint


# --- events ------------------------------------------------------------------------------------------------------


def test_proto_numbers_match_the_design() -> None:
    fields = message("headwater.v1.ChangeFeedEvent").DESCRIPTOR.fields
    assert {each.name: each.number for each in fields} == {
        "value": 1,
        "checkpoint": 2,
        "error": 3,
        "steady_state": 4,
        "delete_range": 5,
        "schema_change": 6,
    }


def test_catch_up_then_steady_then_live(files: Whole, channel: grpc.Channel) -> None:
    base = now(channel)
    files.run("INSERT INTO t VALUES (1, 'a')")
    files.run("UPDATE t SET v = 'b' WHERE k = 1")
    with Feed(channel, spans=[span("t")], base=base.ts, with_diff=True) as feed:
        caught = feed.upto("steady_state")
        assert [(each.key, row(each)) for each in values(caught)] == [
            (KEY[1], {"k": 1, "v": "a"}),
            (KEY[1], {"k": 1, "v": "b"}),
        ]
        assert [each.HasField("prev_value") for each in values(caught)] == [False, True]
        assert json.loads(values(caught)[1].prev_value) == {"k": 1, "v": "a"}
        files.run("DELETE FROM t WHERE k = 1")
        (gone,) = values(feed.until(head(files)))
        assert row(gone) is None and json.loads(gone.prev_value) == {"k": 1, "v": "b"}
        times = [at(each.ts) for each in (*values(caught), gone)]
        assert at(base.ts) < times[0] < times[1] < times[2]


def test_feed_without_diff_has_no_previous_value(files: Whole, channel: grpc.Channel) -> None:
    with Feed(channel, base_offset=0) as feed:
        files.run("INSERT INTO t VALUES (1, 'a')")
        files.run("DELETE FROM t")
        assert not any(each.HasField("prev_value") for each in values(feed.until(head(files))))


def test_change_at_the_base_is_not_sent(files: Whole, channel: grpc.Channel) -> None:
    files.run("INSERT INTO t VALUES (1, 'a')")
    files.run("INSERT INTO t VALUES (2, 'b')")
    with Feed(channel, spans=[span("t")], base_offset=0) as feed:
        first, second = values(feed.until(head(files)))
    with Feed(channel, spans=[span("t")], base=first.ts) as feed:
        assert values(feed.until(head(files))) == [second]
    with Feed(channel, spans=[span("t")], base=second.ts) as feed:
        assert values(feed.until(head(files))) == []
    with Feed(channel, spans=[span("t")], base_offset=first.offset) as feed:
        assert values(feed.until(head(files))) == [second]


def test_base_ahead_of_the_clock_skips_earlier_changes(files: Whole, channel: grpc.Channel) -> None:
    base = now(channel).ts
    ahead = own_message("Timestamp", ms=base.ms + 30_000)
    with Feed(channel, spans=[span("t")], base=ahead) as feed:
        files.run("INSERT INTO t VALUES (1, 'a')")
        assert values(feed.until(head(files))) == []


def test_changes_of_a_transaction_share_id_and_time(files: Whole, client: Client, channel: grpc.Channel) -> None:
    with Feed(channel, base_offset=head(files)) as feed:
        tx = client.ok("tx.begin")["tx"]
        for table in ("t", "u", "t"):
            client.ok("sql.exec", sql=f"INSERT INTO {table} SELECT count(*), 'x' FROM {table}", tx=tx)
        client.ok("tx.commit", tx=tx)
        files.run("INSERT INTO u VALUES (9, 'y')")
        found = values(feed.until(head(files)))
    assert [each.table for each in found] == ["t", "u", "t", "u"]
    assert len({each.txn_id for each in found[:3]}) == 1 != len({each.txn_id for each in found})
    assert len({at(each.ts) for each in found[:3]}) == 1 and at(found[3].ts) > at(found[0].ts)


def test_changed_key_is_a_delete_and_an_insert(files: Whole, channel: grpc.Channel) -> None:
    files.run("INSERT INTO t VALUES (1, 'a')")
    with Feed(channel, base_offset=head(files), with_diff=True) as feed:
        files.run("UPDATE t SET k = 7")
        old, new = values(feed.until(head(files)))
    assert (old.key, row(old), json.loads(old.prev_value)) == (KEY[1], None, {"k": 1, "v": "a"})
    assert (new.key, row(new), new.HasField("prev_value")) == (KEY[7], {"k": 7, "v": "a"}, False)
    assert old.offset == new.offset and old.ts == new.ts


def test_open_transaction_does_not_block_feeds(files: Whole, client: Client, channel: grpc.Channel) -> None:
    files.run("INSERT INTO t VALUES (1, 'a')")
    opened = client.ok("tx.begin")["tx"]
    client.ok("sql.exec", sql="UPDATE t SET v = 'open' WHERE k = 1", tx=opened)
    with Feed(channel, spans=[span("t")], base_offset=0) as feed:
        feed.upto("steady_state")
        first = feed.upto("checkpoint")[-1].checkpoint
        while at(feed.upto("checkpoint")[-1].checkpoint.ts) <= at(first.ts):
            pass  # time goes on while it is open
        client.ok("tx.rollback", tx=opened)
        files.run("UPDATE t SET v = 'b' WHERE k = 1")
        assert [row(each)["v"] for each in values(feed.until(head(files)))] == ["b"]


# --- spans -------------------------------------------------------------------------------------------------------


def test_feed_sends_only_the_requested_spans(files: Whole, channel: grpc.Channel) -> None:
    spans = [span("t", KEY[10], KEY[20]), span("t", KEY[15], KEY[30]), span("u")]
    with Feed(channel, spans=spans, base_offset=head(files)) as feed:
        files.run("INSERT INTO t VALUES (9, 0), (10, 0), (17, 0), (29, 0), (31, 0)")
        files.run("INSERT INTO u VALUES (1, 0)")
        for old, new in ((9, 12), (17, 18), (29, 30), (31, 32)):
            files.run(f"UPDATE t SET k = {new} WHERE k = {old}")
        found = [(each.table, each.key, row(each) is not None) for each in values(feed.until(head(files)))]
    assert found == [
        ("t", KEY[10], True),
        ("t", KEY[17], True),
        ("t", KEY[29], True),
        ("u", KEY[1], True),
        ("t", KEY[12], True),  # came in
        ("t", KEY[17], False),
        ("t", KEY[18], True),
        ("t", KEY[29], False),  # went out
    ]


@pytest.mark.parametrize("value", [{"t": "i64", "v": 5}, 5])
def test_span_of_one_key_receives_only_changes_of_its_row(files: Whole, channel: grpc.Channel, value: Any) -> None:
    keys = json.dumps({"prefix": [value]})
    with Feed(channel, spans=[span("t", keys=keys)], base_offset=head(files)) as feed:
        files.run("INSERT INTO t VALUES (4, 0), (5, 0), (6, 0)")
        events = feed.until(head(files))
        assert [each.key for each in values(events)] == [KEY[5]]
        of = [event.checkpoint.span for event in events if event.checkpoint.HasField("span")][0]
        assert of.table == "t" and of.start_key == KEY[5] < of.end_key <= KEY[6]


def test_both_key_bounds_of_a_span_are_inclusive(files: Whole, channel: grpc.Channel) -> None:
    keys = json.dumps({"lower_bound": [{"t": "i64", "v": 5}], "upper_bound": [{"t": "i64", "v": 7}]})
    with Feed(channel, spans=[span("t", keys=keys)], base_offset=head(files)) as feed:
        files.run("INSERT INTO t SELECT value, 0 FROM json_each('[4, 5, 6, 7, 8]')")
        assert [each.key for each in values(feed.until(head(files)))] == [KEY[5], KEY[6], KEY[7]]


def test_feed_of_a_database_includes_new_tables(files: Whole, channel: grpc.Channel) -> None:
    with Feed(channel, base_offset=head(files)) as feed:
        files.run("CREATE TABLE late(k INTEGER PRIMARY KEY)")
        files.run("INSERT INTO late VALUES (1)")
        events = feed.until(head(files))
    assert [each.table for each in values(events)] == ["late"]
    assert [event.schema_change.table for event in events if event.HasField("schema_change")] == ["late"]
    assert not any(event.checkpoint.HasField("span") for event in events if event.HasField("checkpoint"))


# --- checkpoints -------------------------------------------------------------------------------------------------


def test_each_span_has_a_checkpoint_and_the_stream_the_lowest(files: Whole, channel: grpc.Channel) -> None:
    with Feed(channel, spans=[span("t", KEY[1], KEY[5]), span("u")], base_offset=head(files)) as feed:
        feed.upto("steady_state")
        first, second, resolved = [next(iter(feed)).checkpoint for _ in range(3)]
    assert (first.span.table, first.span.start_key, first.span.end_key) == ("t", KEY[1], KEY[5])
    assert second.span.table == "u" and not resolved.HasField("span")
    assert at(resolved.ts) == min(at(first.ts), at(second.ts))


def test_only_resolved_omits_checkpoints_of_spans(files: Whole, channel: grpc.Channel) -> None:
    with Feed(channel, spans=[span("t")], base_offset=head(files), only_resolved=True) as feed:
        assert kinds(feed.upto("checkpoint")) == ["steady_state", "checkpoint"]
        assert not feed.upto("checkpoint")[-1].checkpoint.HasField("span")


@pytest.mark.parametrize(
    ("asked", "spans", "only_resolved", "seconds"),
    [(100, 10, False, 0.1), (100, 400, False, 2.0), (100, 400, True, 0.1), (3_000, 400, False, 3.0)],
)
def test_checkpoint_interval_grows_with_the_number_of_spans_of_a_feed(
    files: Whole,
    channel: grpc.Channel,
    monkeypatch: pytest.MonkeyPatch,
    asked: int,
    spans: int,
    only_resolved: bool,
    seconds: float,
) -> None:
    paces: list[FeedTiming] = []

    def noted(*args: Any) -> FeedTiming:
        paces.append(FeedTiming(*args))
        return paces[-1]

    monkeypatch.setattr(changefeed_module, "FeedTiming", noted)
    several = [span("t", b"%04d" % number, b"%04d" % (number + 1)) for number in range(spans)]
    with Feed(
        channel,
        spans=[*several, *several],
        base_offset=head(files),
        checkpoint_interval_ms=asked,
        only_resolved=only_resolved,
    ) as feed:
        feed.upto("steady_state")
    assert [pace.checkpoints for pace in paces] == [seconds]


def test_idle_spans_advance_and_values_are_followed_by_a_checkpoint(files: Whole, channel: grpc.Channel) -> None:
    with Feed(channel, spans=[span("t")], base_offset=head(files), checkpoint_interval_ms=QUICK) as feed:
        idle = [at(feed.upto("checkpoint")[-1].checkpoint.ts) for _ in range(30)]
        assert idle == sorted(idle) and len(set(idle)) > 2
        files.run("INSERT INTO t VALUES (1, 'a')")
        events = feed.until(head(files))
        (value,) = values(events)
        assert at(value.ts) > idle[-1] and at(events[-1].checkpoint.ts) >= at(value.ts)


def test_checkpoint_does_not_split_a_transaction(files: Whole, channel: grpc.Channel) -> None:
    files.run("INSERT INTO t SELECT value, '' FROM json_each('[1,2,3,4,5,6,7,8,9]')")
    start = head(files)
    for number in range(15):
        files.run(f"UPDATE t SET v = {number}")
    with Feed(channel, spans=[span("t")], base_offset=start) as feed:
        seen: list[Any] = []
        for event in feed.until(head(files)):
            if event.HasField("value"):
                assert not seen or at(event.value.ts) > max(seen), "nothing at or below a checkpoint comes after it"
            elif event.HasField("checkpoint"):
                seen.append(at(event.checkpoint.ts))


def test_reconnect_from_the_last_checkpoint_misses_nothing(files: Whole, channel: grpc.Channel) -> None:
    with Feed(channel, spans=[span("t")], base_offset=head(files)) as feed:
        files.run("INSERT INTO t VALUES (1, 'a')")
        last = feed.until(head(files))[-1].checkpoint
    files.run("INSERT INTO t VALUES (2, 'b')")
    for more in ({}, {"generation": last.generation}):
        with Feed(channel, spans=[span("t")], base=last.ts, **more) as feed:
            assert [each.key for each in values(feed.until(head(files)))] == [KEY[2]]


def test_events_up_to_a_checkpoint_can_be_sorted_by_time(files: Whole, channel: grpc.Channel) -> None:
    """The events before a checkpoint, sorted, are all changes up to its time, in order."""
    with Feed(channel, base_offset=head(files)) as feed:
        for number in range(20):
            files.run(f"INSERT INTO {'tu'[number % 2]} VALUES ({number}, 0)")
        upto, held, out = head(files), [], []
        for event in feed.until(upto):
            if event.HasField("value"):
                held.append(event.value)
            elif event.HasField("checkpoint"):
                ready = sorted(
                    (each for each in held if at(each.ts) <= at(event.checkpoint.ts)), key=lambda v: at(v.ts)
                )
                held = [each for each in held if each not in ready]
                out += ready
    assert not held and [at(each.ts) for each in out] == sorted(at(each.ts) for each in out) and len(out) == 20


# --- ranged deletes and shapes -----------------------------------------------------------------------------------


def test_dropped_table_is_one_range_delete(files: Whole, channel: grpc.Channel) -> None:
    files.run("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    spans = [span("t", KEY[1], KEY[5]), span("u")]
    with Feed(channel, spans=spans, base_offset=head(files)) as feed:
        files.run("DROP TABLE t")
        files.run("CREATE TABLE t(name TEXT PRIMARY KEY)")
        files.run("INSERT INTO u VALUES (3, 'c')")
        events = feed.until(head(files))
    (deleted,) = [event.delete_range for event in events if event.HasField("delete_range")]
    assert (deleted.span.table, deleted.span.start_key, deleted.span.end_key) == ("t", KEY[1], KEY[5])
    assert deleted.ts.ms and deleted.offset and deleted.txn_id
    assert [each.table for each in values(events)] == ["u"]


def test_deletes_of_single_rows_stay_single(files: Whole, channel: grpc.Channel) -> None:
    files.run("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    with Feed(channel, base_offset=head(files)) as feed:
        files.run("DELETE FROM t")
        events = feed.until(head(files))
    assert [each.key for each in values(events)] == [KEY[1], KEY[2]]
    assert "delete_range" not in kinds(events)


def test_new_column_is_reported_and_the_stream_continues(files: Whole, channel: grpc.Channel) -> None:
    with Feed(channel, spans=[span("t")], base_offset=head(files)) as feed:
        files.run("ALTER TABLE t ADD COLUMN w")
        files.run("INSERT INTO t VALUES (1, 'a', 'x')")
        events = feed.until(head(files))
    (change,) = [event.schema_change for event in events if event.HasField("schema_change")]
    assert change.ddl == "ALTER TABLE t ADD COLUMN w" and change.version > 1
    assert [row(each) for each in values(events)] == [{"k": 1, "v": "a", "w": "x"}]


def test_uncaptured_changes_end_the_stream(files: Whole, channel: grpc.Channel) -> None:
    files.run("INSERT INTO t VALUES (1, 'a')")
    with Feed(channel, base_offset=head(files)) as feed:
        files.run("INSERT INTO t VALUES (2, 'b')")
        files.run("ALTER TABLE t RENAME TO s")  # `s` has rows that were never captured
        events, failure = feed.failure()
    error = events[-1].error
    assert error.reason == error.HISTORY_CHANGED and not error.retryable
    assert failure.code() is grpc.StatusCode.OUT_OF_RANGE
    last = events[-2].checkpoint
    with Feed(channel, base=last.ts) as feed:  # it does not help to come again
        events, _ = feed.failure()
    assert events[-1].error.reason == error.reason


# --- rows first --------------------------------------------------------------------------------------------------


def test_rows_of_a_snapshot_version_and_the_feed_after_it_fold_to_the_table(files: Whole, client: Client) -> None:
    """The rows of a pull and the feed from its version have no gap and no change twice."""
    pull = "headwater.v1.PullService"
    files.run("INSERT INTO t SELECT value, 'old' FROM json_each('[1,2,3,4,5]')")
    with calling(client) as caller:
        (one,) = caller.call(f"{pull}/ListRanges", table="t").ranges
        named = {"range_id": one.id, "range_epoch": one.range_epoch, "subscriber_name": "me"}
        version = caller.call(f"{pull}/CdcRegister", **named).init_snapshot_version
        files.run("UPDATE t SET v = 'new' WHERE k > 3")
        files.run("DELETE FROM t WHERE k = 1")
        read = caller.call(f"{pull}/CdcPullSnapshot", current_snapshot_version=version, **named)
        rows = {each.key: json.loads(each.value) for each in read.snapshot_data}
        with Feed(caller.channel, spans=[span("t")], base_offset=version, with_diff=True) as feed:
            for value in values(feed.until(head(files))):
                assert json.loads(value.prev_value) == rows.pop(value.key)
                rows |= {} if row(value) is None else {value.key: row(value)}
    assert sorted((each["k"], each["v"]) for each in rows.values()) == sorted(files.rows("SELECT k, v FROM t"))


# --- base --------------------------------------------------------------------------------------------------------


def test_base_before_the_horizon_gets_the_threshold(files: Whole, channel: grpc.Channel) -> None:
    base = now(channel)
    files.run("INSERT INTO t SELECT value, 0 FROM json_each('[1,2,3,4,5,6,7,8,9,10]')")
    for number in range(30):
        files.run(f"UPDATE t SET v = {number}")
    latest = head(files)
    for start in ({"base": base.ts}, {"base_offset": 3}):
        with Feed(channel, **start) as feed:
            ((event,), failure) = feed.failure()
        assert event.error.reason == event.error.BASE_TOO_OLD and not event.error.retryable
        assert failure.code() is grpc.StatusCode.OUT_OF_RANGE
        trailers = {each.key: each.value for each in failure.trailing_metadata()}
        assert int(trailers["oldest-available"]) == latest - 199
        oldest = event.error.threshold
        assert trailers["changefeed-threshold"] == f"{oldest.ms}.{oldest.counter}"
    with Feed(channel, base=oldest) as feed:
        found = values(feed.until(latest))
    assert found[0].offset >= latest - 199 and len(found) == 200, "whole transactions of 10"
    earlier = own_message("Timestamp", ms=oldest.ms - 1, counter=oldest.counter)
    with Feed(channel, base=earlier) as feed:
        assert feed.failure()[0][-1].error.reason == event.error.BASE_TOO_OLD


def test_base_of_another_generation_is_refused(files: Whole, channel: grpc.Channel) -> None:
    base = now(channel)
    with Feed(channel, base=base.ts, generation="another") as feed:
        events, failure = feed.failure()
    assert events[-1].error.reason == events[-1].error.GENERATION_CHANGED
    assert failure.code() is grpc.StatusCode.OUT_OF_RANGE
    assert failure.details() == f"the log is of generation {base.generation}, not 'another'"


def test_feed_with_skip_catchup_sends_only_later_changes(files: Whole, channel: grpc.Channel) -> None:
    base = now(channel)
    files.run("INSERT INTO t VALUES (1, 'a')")
    for start in ({"base": base.ts}, {"base_offset": 0}):
        with Feed(channel, skip_catchup=True, **start) as feed:
            assert kinds(feed.upto("checkpoint")) == ["steady_state", "checkpoint"]
            files.run("UPDATE t SET v = 'b'")
            assert [row(each)["v"] for each in values(feed.until(head(files)))] == ["b"]


@pytest.mark.parametrize(
    "fields, status",
    [
        ({"base": {"ms": 2**47}}, "INVALID_ARGUMENT"),
        ({"base": {"ms": 2**48}}, "INVALID_ARGUMENT"),
        ({"base": {"ms": 1, "counter": 65536}}, "INVALID_ARGUMENT"),
        ({"base_offset": 10**6}, "INVALID_ARGUMENT"),
        ({"base_offset": 2**64 - 1}, "INVALID_ARGUMENT"),
        ({"generation": "g"}, "INVALID_ARGUMENT"),
        ({"checkpoint_interval_ms": 99}, "INVALID_ARGUMENT"),
        ({"checkpoint_interval_ms": 3_600_001}, "INVALID_ARGUMENT"),
        ({"db": "absent"}, "NOT_FOUND"),
        ({"spans": [{"table": "absent"}]}, "NOT_FOUND"),
        ({"spans": [{"start_key": b"x"}]}, "INVALID_ARGUMENT"),
        ({"spans": [{"table": "t", "start_key": b"b", "end_key": b"a"}]}, "INVALID_ARGUMENT"),
        ({"spans": [{"table": "t", "start_key": b"b", "end_key": b"b"}]}, "INVALID_ARGUMENT"),
        ({"spans": [{"table": "t", "keys": "["}]}, "INVALID_ARGUMENT"),
        ({"spans": [{"table": "t", "keys": '{"prefix": ' + "[" * 5_000 + "]" * 5_000 + "}"}]}, "INVALID_ARGUMENT"),
        ({"spans": [{"table": "t", "keys": '{"prefix": [' + "[]," * 30_000 + "[]]}"}]}, "RESOURCE_EXHAUSTED"),
        ({"spans": [{"table": "t", "keys": '{"prefix": []}'}]}, "INVALID_ARGUMENT"),
        ({"spans": [{"table": "t", "keys": '{"prefix": [[1]]}'}]}, "INVALID_ARGUMENT"),
        ({"spans": [{"table": "t", "keys": '{"prefix": null}'}]}, "INVALID_ARGUMENT"),
        ({"spans": [{"table": "t", "keys": '{"odd": 1}'}]}, "INVALID_ARGUMENT"),
        ({"spans": [{"table": "t", "keys": '{"prefix": [{"t":"i64","v":1}]}', "end_key": b"x"}]}, "INVALID_ARGUMENT"),
        ({"spans": [{"table": "t", "range_epoch": 1}]}, "INVALID_ARGUMENT"),
        ({"spans": [{"range_id": 999, "range_epoch": 1}]}, "NOT_FOUND"),
        ({"spans": [{"range_id": 2**64 - 1, "range_epoch": 1}]}, "NOT_FOUND"),
        ({"spans": [{"table": "t"}] * 1001}, "INVALID_ARGUMENT"),
    ],
)
def test_invalid_request_is_refused_by_status(channel: grpc.Channel, fields: Any, status: str) -> None:
    with Feed(channel, **fields) as feed:
        events, failure = feed.failure()
    assert events == [] and failure.code() is grpc.StatusCode[status], failure
    assert failure.details()


# --- ends --------------------------------------------------------------------------------------------------------


def test_stopping_server_sends_a_last_checkpoint(files: Whole) -> None:
    with serving(files) as client:
        channel = grpc.insecure_channel(client.server.grpc_address)
        feed = Feed(channel, spans=[span("t")])
        feed.upto("checkpoint")
        files.run("INSERT INTO t VALUES (1, 'a')")
        upto = head(files)
        feed.until(upto)
    events, failure = feed.failure()
    assert kinds(events)[-3:] == ["checkpoint", "checkpoint", "error"]
    assert events[-1].error.reason == events[-1].error.SERVER_STOPPING and events[-1].error.retryable
    assert events[-2].checkpoint.offset >= upto and failure.code() is grpc.StatusCode.UNAVAILABLE
    channel.close()


def test_dropped_database_ends_its_feeds(files: Whole, channel: grpc.Channel) -> None:
    files.create("other")
    files.run("CREATE TABLE o(k INTEGER PRIMARY KEY)", db="other")
    with Feed(channel, db="other", spans=[span("o")]) as feed:
        feed.upto("steady_state")
        files.drop("other")
        events, failure = feed.failure()
    assert events[-1].error.reason == events[-1].error.REMOVED and failure.code() is grpc.StatusCode.NOT_FOUND


def test_split_range_ends_its_feed_and_names_the_new_ranges(
    files: Whole, client: Client, channel: grpc.Channel
) -> None:
    files.run("INSERT INTO t SELECT value, 0 FROM json_each('[1,2,3,40,50,60]')")
    (one,) = client.ok("pull.ranges", table="t")["ranges"]
    with Feed(channel, spans=[span("", range_id=one["id"], range_epoch=one["epoch"])], base_offset=0) as feed:
        assert len(values(feed.until(head(files)))) == 6
        client.ok("pull.split", table="t", range=one["id"], epoch=one["epoch"], at=KEY[30].hex())
        events, failure = feed.failure()
    error, last = events[-1].error, events[-2].checkpoint
    assert error.reason == error.RANGE_SPLIT and failure.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert [(each.start_key, each.end_key) for each in error.spans] == [(b"", KEY[30]), (KEY[30], b"")]
    feeds = [Feed(channel, spans=[each], base=last.ts) for each in error.spans]
    files.run("UPDATE t SET v = 1 WHERE k IN (3, 40)")
    assert [[each.key for each in values(feed.until(head(files)))] for feed in feeds] == [[KEY[3]], [KEY[40]]]
    assert len(client.ok("pull.ranges", table="t")["ranges"]) == 1, "so small that they were put together again"
    for feed in feeds:
        error = feed.failure()[0][-1].error
        assert error.reason == error.RANGE_MERGED and len(error.spans) == 1
    with Feed(channel, spans=[span("", range_id=one["id"], range_epoch=one["epoch"])]) as feed:
        assert feed.failure()[0][-1].error.spans  # of before: told at once
