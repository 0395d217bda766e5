"""Limits of change feeds: slow readers, reconnect loops, and callers without the right."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.queries.open_databases import Whole
from tests.serve.changefeeds import Feed, kinds, span, values
from tests.serve.server_fixture import Client, serving
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.config import FeedsConfig, LogConfig, Secret, ServeConfig
from headwater.errors import Busy, HeadwaterError, LimitExceeded, LogDamaged, NotFound, StorageFull, Unavailable
from headwater.ranges.changefeed.changefeed import ChangeFeed, FeedTiming
from headwater.serve.grpc import calls
from headwater.serve.grpc import changefeed as changefeed_module
from headwater.serve.grpc.changefeed_messages import failure as failure_event

pytestmark = pytest.mark.slow

ADMIN = (("authorization", "Bearer t"),)


@contextlib.contextmanager
def served(folder: Path, max_streams: int = 100, **settings: Any) -> Iterator[tuple[Whole, Client, grpc.Channel]]:
    """Serve two tables with a credential."""
    feeds = FeedsConfig(**{"checkpoint_seconds": 0.1} | settings)
    with Whole(
        folder / "data", log=LogConfig(flush_ms=5), feeds=feeds, serve=ServeConfig(max_streams=max_streams)
    ) as files:
        files.run("CREATE TABLE t(k INTEGER PRIMARY KEY, v)")
        files.run("CREATE TABLE u(k INTEGER PRIMARY KEY, v)")
        with serving(files, token=Secret("t"), folder=folder) as client:
            client.http.headers["authorization"] = "Bearer t"
            with grpc.insecure_channel(client.server.grpc_address) as channel:
                yield files, client, channel


def metric(client: Client, name: str) -> float:
    lines = client.http.get("/metrics").text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"{name} ")))


def filled(files: Whole, rows: int) -> None:
    """Rows of 4 KB each."""
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})"
    files.run(f"{numbers} INSERT INTO t SELECT i, hex(randomblob(2000)) FROM n")
    assert files.database("main").catch_up(PATIENCE)
    files.database("main").log.flush()


# --- slow readers ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stalled_change_feed_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GRACE_SECONDS", PATIENCE)  # to read the last message before the status
    with served(tmp_path, slow_consumer_seconds=0.5) as (files, client, channel):
        filled(files, 3_000)
        with Feed(channel, metadata=ADMIN, base_offset=0) as feed:
            # It takes nothing, and the server loses its patience.
            wait_until(lambda: metric(client, "headwater_changefeed_slow_consumers_total"))
            events, failure = feed.failure()
        assert kinds(events)[0] in ("schema_change", "value")
        assert failure.code() is grpc.StatusCode.UNAVAILABLE and "too slow" in str(failure.details())
        trailers = {each.key: each.value for each in failure.trailing_metadata()}
        assert trailers["changefeed-reason"] == "SLOW_CONSUMER"
        assert len(values(events)) < 3_000
        wait_until(lambda: metric(client, "headwater_changefeeds") == 0, "the feed is closed")
        feeds = client.server._api.feeding()
        feeds.config = dataclasses.replace(feeds.config, slow_consumer_seconds=PATIENCE)
        with Feed(channel, metadata=ADMIN, base_offset=0) as feed:
            assert len(values(feed.upto("steady_state"))) == 3_000


def test_lagging_reader_gets_a_last_checkpoint_and_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader takes every message, but lags for longer than the server allows."""
    monkeypatch.setattr(changefeed_module, "FeedTiming", lambda checkpoints, *_: FeedTiming(checkpoints, patience=0.0))
    with served(tmp_path) as (files, client, channel):
        log = files.database("main").log
        with Feed(channel, metadata=ADMIN, base_offset=log.latest) as feed:
            feed.upto("steady_state")
            filled(files, 2_000)  # many pages of 256 KiB
            events, failure = feed.failure()
        error = events[-1].error
        trailers = {each.key: each.value for each in failure.trailing_metadata()}
        assert trailers["changefeed-reason"] == "SLOW_CONSUMER"
        assert failure.code() is grpc.StatusCode.UNAVAILABLE
        assert error.reason == error.SLOW_CONSUMER and error.retryable
        assert kinds(events)[-2:] == ["checkpoint", "error"]


# --- catch-up ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_reconnect_loop_gets_a_retry_delay(tmp_path: Path) -> None:
    with served(tmp_path, catchup_budget=1_000) as (files, client, channel):
        filled(files, 2_000)
        began = time.monotonic()
        with Feed(channel, metadata=ADMIN, base_offset=0) as feed:
            assert len(values(feed.upto("steady_state"))) == 2_000, "who has anything left may begin"
        with Feed(channel, metadata=ADMIN, base_offset=0) as feed:
            events, failure = feed.failure()
        error = events[-1].error
        assert error.reason == error.CATCHUP_LIMIT and error.retryable
        assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailers = {each.key: each.value for each in failure.trailing_metadata()}
        passed_ms = (time.monotonic() - began) * 1000
        assert 60_000 - passed_ms < int(trailers["retry-after-ms"]) < 61_000
        with Feed(channel, metadata=ADMIN, base_offset=0, skip_catchup=True) as feed:
            feed.upto("steady_state")
        with Feed(channel, metadata=ADMIN) as feed:
            feed.upto("steady_state")
        other = client.ok("security.token.create", name="other", role="viewer")["token"]
        with Feed(channel, metadata=(("x-api-key", other),), base_offset=0) as feed:
            feed.upto("steady_state")  # others have what is theirs


@pytest.mark.slow
def test_second_catch_up_of_a_caller_waits_until_the_first_ends(tmp_path: Path) -> None:
    with served(tmp_path, catchups=1, slow_consumer_seconds=60.0) as (files, client, channel):
        filled(files, 3_000)
        first = Feed(channel, metadata=ADMIN, base_offset=0)
        next(iter(first))
        second = Feed(channel, metadata=ADMIN, base_offset=0)
        while not metric(client, "headwater_changefeed_catchups_waiting"):
            pass
        assert metric(client, "headwater_changefeed_catchups") == 1
        assert metric(client, "headwater_changefeeds") == 2
        first.call.cancel()  # it leaves, and gives its place back
        assert len(values(second.upto("steady_state"))) == 3_000
        second.call.cancel()
        assert metric(client, "headwater_changefeed_checkpoints_total") > 0


# --- who may -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scope, fields, status",
    [
        ("main.t", {"spans": [span("t")]}, None),
        ("main.t", {"spans": [span("t"), span("u")]}, "PERMISSION_DENIED"),
        ("main.t", {"spans": [span("absent")]}, "PERMISSION_DENIED"),
        ("main.t", {}, "PERMISSION_DENIED"),
        ("main", {}, None),
        ("other", {"spans": [span("t")]}, "PERMISSION_DENIED"),
        ("other", {}, "PERMISSION_DENIED"),
    ],
)
def test_change_feed_is_refused_to_callers_without_scopes_for_all_its_tables(
    tmp_path: Path, scope: str, fields: Any, status: str | None
) -> None:
    with served(tmp_path) as (_, client, channel):
        token = client.ok("security.token.create", name="x", role="viewer", scopes=[scope])["token"]
        with Feed(channel, metadata=(("x-api-key", token),), **fields) as feed:
            if status is None:
                feed.upto("steady_state")
            else:
                events, failure = feed.failure()
                assert not events and failure.code() is grpc.StatusCode[status]


def test_range_outside_the_scope_is_not_found(tmp_path: Path) -> None:
    with served(tmp_path) as (_, client, channel):
        (one,) = client.ok("pull.ranges", table="u")["ranges"]
        token = client.ok("security.token.create", name="x", role="viewer", scopes=["main.t"])["token"]
        asked = [span("t"), span("", range_id=one["id"], range_epoch=one["epoch"])]
        with Feed(channel, metadata=(("x-api-key", token),), spans=asked) as feed:
            events, failure = feed.failure()
        assert not events and failure.code() is grpc.StatusCode.NOT_FOUND


def test_revocation_ends_the_stream(tmp_path: Path) -> None:
    with served(tmp_path) as (_, client, channel):
        made = client.ok("security.token.create", name="x", role="viewer")
        with Feed(channel, metadata=(("x-api-key", made["token"]),)) as feed:
            feed.upto("steady_state")
            client.ok("security.token.revoke", id=made["id"])
            _, failure = feed.failure()
        assert failure.code() is grpc.StatusCode.UNAUTHENTICATED


def test_two_api_keys_with_the_same_name_have_separate_catchup_budgets(tmp_path: Path) -> None:
    with served(tmp_path, catchup_budget=1_000) as (files, client, channel):
        filled(files, 1_100)
        mine, theirs = (client.ok("security.token.create", name="x", role="viewer")["token"] for _ in range(2))
        with Feed(channel, metadata=(("x-api-key", theirs),), base_offset=0) as feed:
            feed.upto("steady_state")
        with Feed(channel, metadata=(("x-api-key", theirs),), base_offset=0) as feed:
            assert feed.failure()[1].code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with Feed(channel, metadata=(("x-api-key", mine),), base_offset=0) as feed:
            feed.upto("steady_state")


def test_checkpoint_interval_grows_with_the_spans_of_all_feeds_of_a_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feeds: list[ChangeFeed] = []

    def noted(*args: Any) -> ChangeFeed:
        feeds.append(ChangeFeed(*args))
        return feeds[-1]

    monkeypatch.setattr(changefeed_module, "ChangeFeed", noted)
    spans = [span("t", b"%04d" % number, b"%04d" % (number + 1)) for number in range(40)]
    with served(tmp_path) as (_, client, channel):
        made = (client.ok("security.token.create", name=name, role="viewer")["token"] for name in ("x", "x"))
        mine, theirs = ((("x-api-key", token),) for token in made)
        with Feed(channel, metadata=mine) as whole, Feed(channel, metadata=mine, only_resolved=True) as resolved:
            with Feed(channel, metadata=mine, spans=spans) as many:
                for feed in (whole, resolved, many):
                    feed.upto("steady_state")
                with Feed(channel, metadata=theirs) as other, Feed(channel, metadata=ADMIN) as owner:
                    other.upto("steady_state"), owner.upto("steady_state")
                    assert [feed.least() for feed in feeds] == [0.21, 0.21, 0.21, 0.1, 0.0]
            wait_until(lambda: feeds[0].least() == 0.1, "the one with many spans is closed")


def test_ranges_of_a_feed_with_only_resolved_count_for_its_checkpoint_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paces: list[FeedTiming] = []

    def noted(*args: Any) -> FeedTiming:
        paces.append(FeedTiming(*args))
        return paces[-1]

    monkeypatch.setattr(changefeed_module, "FeedTiming", noted)
    with served(tmp_path) as (files, client, channel):
        filled(files, 1_000)
        found = client.ok("pull.ranges", table="t", target_bytes=65_536)["ranges"]
        ranges = [span("", range_id=one["id"], range_epoch=one["epoch"]) for one in found]
        assert len(ranges) > 20
        asked = {"only_resolved": True, "checkpoint_interval_ms": 100, "skip_catchup": True}
        with Feed(channel, metadata=ADMIN, spans=ranges, **asked) as feed:
            feed.upto("steady_state")
        assert [pace.checkpoints for pace in paces] == [5 * len(ranges) / 1000]


def test_change_feeds_count_toward_the_stream_limit_of_the_server(tmp_path: Path) -> None:
    """A feed above the limit is refused when it opens; open ones continue."""
    with served(tmp_path, max_streams=2) as (files, client, channel):
        with Feed(channel, metadata=ADMIN) as one, Feed(channel, metadata=ADMIN) as two:
            one.upto("steady_state"), two.upto("steady_state")
            with Feed(channel, metadata=ADMIN) as third:
                events, failure = third.failure()
            assert not events and failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            trailers = {each.key: each.value for each in failure.trailing_metadata()}
            assert "max_streams" in trailers["headwater-hint"] and "wait_ms" not in trailers["headwater-hint"]
            answer = client.http.get("/api/v1/changes/main/t")
            assert answer.status_code == 429, "the others count them, too"
            files.run("INSERT INTO t VALUES (1, 1)")
            assert one.upto("value") and two.upto("value")
        while metric(client, "headwater_changefeeds"):
            pass  # they leave, and give their places back
        with Feed(channel, metadata=ADMIN) as again:
            again.upto("steady_state")


@pytest.mark.parametrize(
    "error, reason",
    [
        (Busy("x"), "UNAVAILABLE"),
        (Unavailable("x"), "UNAVAILABLE"),
        (StorageFull("x"), "UNAVAILABLE"),
        (Unavailable("x", reason="SERVER_STOPPING"), "SERVER_STOPPING"),
        (LimitExceeded("x"), "CATCHUP_LIMIT"),
        (NotFound("x"), "REMOVED"),
        (LogDamaged("x"), "INTERNAL"),
    ],
)
def test_error_event_has_the_reason_and_the_retryable_flag_of_its_error(error: HeadwaterError, reason: str) -> None:
    told = failure_event(error).error
    assert told.Reason.Name(told.reason) == reason and told.retryable == error.retryable
