"""Memory of unread gRPC messages is limited for each caller, and large messages are encoded in threads."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.queries.open_databases import Whole
from tests.serve.grpc_calls import KV, SUBSCRIPTIONS, Caller, Reading, calling
from tests.serve.server_fixture import Client, serving
from tests.suite.deadlines import wait_until

from headwater.config import FeedsConfig, LogConfig, Secret
from headwater.serve.grpc import calls, changefeed_messages, kv, sochdb
from headwater.serve.grpc.calls import SMALL
from headwater.serve.grpc.messages import LARGE
from headwater.serve.limits.unread_answers import UNREAD

pytestmark = pytest.mark.slow

FEED = "headwater.v1.ChangeFeedService/ChangeFeed"
PULL = "headwater.v1.PullService"
LENGTH = 10_000_000  # of a value, in bytes
ADMIN = ("authorization", "Bearer admin")
SLOW = FeedsConfig(catchups=10, slow_consumer_seconds=3600.0)

Open = Callable[[Caller], Reading]


def feed(caller: Caller) -> Reading:
    """Open a change feed; one of its messages has a large row."""
    return caller.stream(FEED, base_offset=0, spans=[{"table": "t"}])


def scan(caller: Caller) -> Reading:
    """Open a scan whose only message has a large value; its page is counted too."""
    return caller.stream(f"{KV}/Scan", prefix=b"large")


SIZES = {feed: LENGTH, scan: 2 * LENGTH}


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Whole]:
    with Whole(tmp_path, log=LogConfig(flush_ms=5), feeds=SLOW) as made:
        yield made


@contextlib.contextmanager
def served(files: Whole) -> Iterator[Client]:
    """A server with a large row and a large value."""
    wait_until(lambda: UNREAD.used == 0, "answers of other tests were released")
    with serving(files, folder=files.folder, token=Secret("admin"), drain_seconds=0.1) as client:
        client.http.headers["authorization"] = "Bearer admin"
        client.rows("CREATE TABLE t(k INTEGER PRIMARY KEY, v TEXT)")
        client.rows(f"INSERT INTO t VALUES (1, hex(zeroblob({LENGTH // 2})))")
        with calling(client, ADMIN) as admin:
            admin.call(f"{KV}/Put", key=b"large", value=bytes(LENGTH))
        yield client


def key(client: Client, name: str) -> tuple[dict[str, str], tuple[str, str]]:
    """Create a viewer's key; return it and the metadata that carries it."""
    made = client.ok("security.token.create", name=name, role="viewer")
    return made, ("x-api-key", made["token"])


@pytest.mark.parametrize("opened", [feed, scan])
def test_caller_with_unread_messages_is_refused_and_others_are_not(
    files: Whole, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = SIZES[opened]
    monkeypatch.setattr(UNREAD, "max_memory", 5 * each + LENGTH // 2)
    with served(files) as client:
        ada, bob = (key(client, name)[1] for name in ("ada", "bob"))
        with calling(client, ada) as caller, calling(client, bob) as other:
            streams = [opened(caller) for _ in range(2)]
            wait_until(lambda: UNREAD.used >= 2 * each, "both messages are being sent")
            failure = opened(caller).failure()
            assert failure.code() is grpc.StatusCode.UNAVAILABLE and "unread answers" in str(failure.details())
            streams.append(opened(other))
            wait_until(lambda: UNREAD.used >= 3 * each, "that of another caller is being sent too")
            for stream in streams:
                stream.call.cancel()
            wait_until(lambda: UNREAD.used == 0, "the memory was released")
            assert opened(caller).take(1)


@pytest.mark.parametrize("opened", [feed, scan])
def test_unread_messages_of_all_callers_are_limited_together(
    files: Whole, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = SIZES[opened]
    monkeypatch.setattr(UNREAD, "max_memory", 2 * each)
    with served(files) as client, calling(client, ADMIN) as owner:
        first = opened(owner)
        wait_until(lambda: UNREAD.used >= each, "the message is being sent")
        assert opened(owner).failure().code() is grpc.StatusCode.UNAVAILABLE
        first.call.cancel()


@pytest.mark.parametrize("opened", [feed, scan])
def test_message_that_was_read_is_not_counted(files: Whole, opened: Open) -> None:
    each = SIZES[opened]
    with served(files) as client, calling(client, key(client, "ada")[1]) as caller:
        stream = opened(caller)
        wait_until(lambda: UNREAD.used >= each, "the message is being sent")
        assert each <= UNREAD.used < each + LENGTH
        stream.take(1)
        wait_until(lambda: UNREAD.used == 0, "the memory was released")
        stream.call.cancel()


@pytest.mark.parametrize("way", ["close", "revoke", "stop"])
@pytest.mark.parametrize("opened", [feed, scan])
def test_message_is_released_when_its_call_ends(
    files: Whole, opened: Open, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "GRACE_SECONDS", 0.1)
    with contextlib.ExitStack() as around:
        client = around.enter_context(served(files))
        made, metadata = key(client, "ada")
        with calling(client, metadata) as caller:
            stream = opened(caller)
            wait_until(lambda: UNREAD.used >= SIZES[opened], "the message is being sent")
            if way == "close":
                caller.channel.close()
            elif way == "revoke":
                client.ok("security.token.revoke", id=made["id"])
            else:
                around.close()
            wait_until(lambda: UNREAD.used == 0, "the memory was released")
            assert not UNREAD._unread and stream is not None


def test_page_of_a_scan_is_counted_until_all_of_it_is_read(files: Whole) -> None:
    with served(files) as client, calling(client, ADMIN) as admin:
        size = LENGTH // 10  # a page ends after 4 MiB
        for number in range(3):
            admin.call(f"{KV}/Put", key=b"page%d" % number, value=bytes(size))
        stream = admin.stream(f"{KV}/Scan", prefix=b"page")
        stream.take(1)
        four = range(4 * size, 5 * size)
        wait_until(lambda: UNREAD.used in four, "the page of three values and its second message are counted")
        assert len(stream.rest()) == 2
        wait_until(lambda: UNREAD.used == 0, "the memory was released")


def test_small_messages_are_sent_however_many_are_unread(files: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(files) as client, calling(client, ADMIN) as owner:
        owner.call(f"{KV}/Put", key=b"small", value=bytes(SMALL // 2))
        monkeypatch.setattr(UNREAD, "max_memory", 0)
        (found,) = owner.stream(f"{KV}/Scan", prefix=b"small").rest()
        assert found.value == bytes(SMALL // 2)


# --- where they are encoded --------------------------------------------------------------------------------------


def in_thread() -> bool:
    return threading.current_thread().name.startswith("headwater-read")


def test_large_values_are_encoded_in_a_thread(files: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    made = kv.sochdb_v1

    def noted(name: str, **fields: Any) -> Any:
        if name not in ("KvEntry", "KvPutResponse"):
            found.append(in_thread())
        return made(name, **fields)

    with served(files) as client, calling(client, ADMIN) as caller:
        caller.call(f"{KV}/Put", key=b"small", value=b"x")
        monkeypatch.setattr(kv, "sochdb_v1", noted)
        for name in (b"large", b"small"):
            caller.call(f"{KV}/Get", key=name)
            caller.call(f"{KV}/BatchGet", keys=[name])
            caller.stream(f"{KV}/Scan", prefix=name).rest()
        assert found == [True] * 3 + [False] * 3


def test_large_row_of_a_change_feed_is_encoded_in_a_thread(files: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[bool, bool] = {}  # by whether the event is large
    encoded = changefeed_messages.encoded

    def noted(event: Any) -> bytes:
        data = encoded(event)
        threads[len(data) > LARGE] = in_thread()
        return data

    monkeypatch.setattr(changefeed_messages, "encoded", noted)
    with served(files) as client, calling(client, ADMIN) as caller:
        stream = feed(caller)
        events: list[Any] = []
        while not any(event.HasField("steady_state") for event in events):
            events += stream.take(1)[0].events
        stream.call.cancel()
        (value,) = [event.value for event in events if event.HasField("value")]
        assert len(value.value) > LENGTH
        assert threads == {True: True, False: False}


def test_piece_of_a_subscription_with_a_large_row_is_split_in_a_thread_and_not_cached(
    files: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    messages = sochdb.messages

    def noted(piece: bytes) -> list[bytes]:
        threads.append(in_thread())
        return messages(piece)

    monkeypatch.setattr(sochdb, "messages", noted)
    with served(files) as client, calling(client, ADMIN) as caller:
        (found,) = caller.stream(f"{SUBSCRIPTIONS}/Subscribe", tables=["t"], operations=[1], start_sequence=1).take(1)
        assert len(found.after_value) > LENGTH and threads == [True]
        monkeypatch.setattr(sochdb, "small_messages", noted)
        client.rows("INSERT INTO t VALUES (2, 'small')")
        caller.stream(f"{SUBSCRIPTIONS}/Subscribe", tables=["t"], start_sequence=found.sequence + 1).take(1)
        assert threads == [True, False]


def test_idle_subscription_does_not_keep_its_last_message(files: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bytes] = []
    messages = sochdb.messages

    def noted(piece: bytes) -> list[bytes]:
        found.extend(messages(piece))
        return found[:]

    monkeypatch.setattr(sochdb, "messages", noted)
    with served(files) as client, calling(client, ADMIN) as caller:
        asked: dict[str, Any] = {"tables": ["t"], "operations": [1], "start_sequence": 1}
        stream = caller.stream(f"{SUBSCRIPTIONS}/Subscribe", **asked)
        assert stream.take(1)
        wait_until(lambda: sys.getrefcount(found[0]) == 2, "only the test has the message")
        assert stream.call.is_active()
        stream.call.cancel()


def test_pull_answers_with_large_rows_are_encoded_outside_the_event_loop(
    files: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[type] = []

    def noted(answer: Any) -> bytes:
        kinds.append(type(answer))
        return answer if isinstance(answer, bytes) else bytes(answer.SerializeToString())

    with served(files) as client, calling(client, ADMIN) as caller:
        (one,) = caller.call(f"{PULL}/ListRanges", table="t").ranges
        asked = {"range_id": one.id, "range_epoch": one.range_epoch, "subscriber_name": "me"}
        version = caller.call(f"{PULL}/CdcRegister", **asked).init_snapshot_version
        monkeypatch.setattr(calls, "_bytes", noted)
        rows = caller.call(f"{PULL}/CdcPullSnapshot", current_snapshot_version=version, **asked)
        changes = caller.call(f"{PULL}/CdcPullLog", **asked)
        assert len(rows.snapshot_data[0].value) > LENGTH and len(changes.log_data[-1].value) > LENGTH
        assert kinds == [bytes, bytes]
