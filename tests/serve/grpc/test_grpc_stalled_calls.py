"""Callers of gRPC that leave, or leave their answers unread: let go, and no defect of the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc._cython import cygrpc
from tests.queries.open_databases import Whole
from tests.serve.changefeeds import own_message
from tests.serve.grpc_calls import KV, SUBSCRIPTIONS, calling
from tests.serve.http2 import ACK, END_HEADERS, HEADERS, PREFACE, SETTINGS, frame, headers
from tests.serve.server_fixture import Client, serving
from tests.suite.deadlines import PATIENCE

from headwater.config import FeedsConfig, LogConfig
from headwater.errors import Busy, HeadwaterError, Unavailable
from headwater.model.principal import ANONYMOUS
from headwater.serve.api import Api
from headwater.serve.grpc import calls, stalled_calls
from headwater.serve.grpc.calls import Caller, _Call
from headwater.serve.grpc.changefeed import ChangeFeedService
from headwater.serve.grpc.connections.acceptor import Acceptor
from headwater.serve.grpc.messages import message
from headwater.serve.grpc.stalled_calls import StalledCalls, UnreadAnswers
from headwater.serve.limits.request_body import BODIES
from headwater.serve.limits.slow_reader_limits import PROGRESS
from headwater.serve.metrics.changefeed_metrics import ChangefeedCounters
from headwater.serve.thread_bridge import Bridge

SUBSCRIBE = f"/{SUBSCRIPTIONS}/Subscribe"


class Pouring:
    """A call whose number of unread messages the test sets."""

    def __init__(self) -> None:
        self.pending: int | None = None
        self.end: asyncio.Future[HeadwaterError] = asyncio.get_running_loop().create_future()

    def cut(self, error: HeadwaterError) -> None:
        if not self.end.done():
            self.end.set_result(error)


def cancelled(client: Client) -> bool:
    return (
        f'headwater_grpc_calls_total{{method="{SUBSCRIBE}",status="CANCELLED"}} 1.0' in client.http.get("/metrics").text
    )


def until(is_so: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end, "it never came to be"


def test_call_ends_only_if_one_message_stays_unread_for_too_long() -> None:
    async def main() -> None:
        loop, now = asyncio.get_running_loop(), 0.0
        loop.time = lambda: now  # type: ignore[method-assign]
        stalls = StalledCalls(2.0)
        stuck, quiet, busy = Pouring(), Pouring(), Pouring()
        stuck.pending = 7
        with stalls.watch(stuck), stalls.watch(quiet), stalls.watch(busy):
            number = 0
            while not stuck.end.done():
                number += 1
                busy.pending = number  # always another one
                now += 0.01
                await asyncio.sleep(0)
            assert 2.0 <= now < 3.0
            assert isinstance(stuck.end.result(), Unavailable) and "stall_seconds" in stuck.end.result().hint
            assert not quiet.end.done() and not busy.end.done()
        assert stalls._timer is None, "nobody is looked after"

    asyncio.run(main())


@pytest.mark.slow
def test_stalled_subscriber_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GRACE_SECONDS", 0.1)
    with (
        Whole(tmp_path, log=LogConfig(flush_ms=5)) as files,
        serving(files, stall_seconds=0.5) as client,
        calling(client) as caller,
        calling(client) as other,
    ):
        files.run("CREATE TABLE t(k INTEGER PRIMARY KEY, v)")
        files.run("CREATE TABLE u(k INTEGER PRIMARY KEY, v)")
        reader, quiet = caller.subscribe(tables=["t"]), other.subscribe(tables=["u"])
        for _ in range(12):  # more than all buffers between the two hold
            files.run("INSERT INTO t(v) VALUES (hex(zeroblob(500000)))")
        until(lambda: cancelled(client))
        assert reader.failure().code() is grpc.StatusCode.UNAVAILABLE, "its connection is closed"
        files.run("INSERT INTO u VALUES (1, 1)")
        assert len(quiet.take(1)) == 1, "who has nothing to read is not late"


class Gone:
    """The context of a call whose caller left in the midst of a message."""

    async def write(self, message: Any) -> None:
        raise cygrpc.ExecuteBatchError("Failed grpc_call_start_batch")


class Counted:
    """Records the status with which each call ended."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    def called(self, method: str, status: str) -> None:
        self.ends.append(status)


def test_disconnect_during_a_message_is_not_logged_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    counted: Any = Counted()

    async def main() -> None:
        gone: Any = Gone()
        async with _Call("/a/B", gone, counted, 100) as call:
            await call.write(b"")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert counted.ends == ["CANCELLED"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_change_feed_with_an_unread_last_message_is_cut_off(tmp_path: Path) -> None:
    async def main(files: Whole) -> None:
        api, bridge = Api.over(files), Bridge(threads=2)
        api.feeds = files.open_feeds()
        service = ChangeFeedService(api, bridge, ChangefeedCounters())
        cut: asyncio.Future[HeadwaterError] = asyncio.get_running_loop().create_future()
        context: Any = None  # nothing is sent before it fails
        caller = Caller(ANONYMOUS, "127.0.0.1", context, cut.set_result)
        asked = own_message("ChangeFeedRequest", base_offset=0, generation="of another log")
        pouring: Any = service.methods()["ChangeFeed"](caller, asked)
        (last,) = message("headwater.v1.ChangeFeedResponse").FromString(await anext(pouring)).events
        assert last.error.reason == last.error.GENERATION_CHANGED
        error = await asyncio.wait_for(cut, PATIENCE)
        assert error.extra["reason"] == "SLOW_CONSUMER"
        await pouring.aclose()
        await api.feeds.close()
        bridge.close()

    feeds = FeedsConfig(slow_consumer_seconds=0.05)
    with Whole(tmp_path, log=LogConfig(flush_ms=5), feeds=feeds) as files:
        asyncio.run(main(files))


# --- single answers ----------------------------------------------------------------------------------------------


class Answered:
    """The context of a call that has an answer, with the name of its connection."""

    def __init__(self, peer: str) -> None:
        self.name, self.ends = f"unix:/folder/{peer}@127.0.0.1", list[Any]()

    def peer(self) -> str:
        return self.name

    def add_done_callback(self, end: Any) -> None:
        self.ends.append(end)


def test_answer_unread_for_too_long_closes_its_connection() -> None:
    async def main() -> None:
        loop, now = asyncio.get_running_loop(), 0.0
        loop.time = lambda: now  # type: ignore[method-assign]
        answers, closed = UnreadAnswers(2.0), list[tuple[str, float]]()
        answers.close = lambda peer, why: closed.append((peer, now))
        small, large, read = (cast(Any, Answered(name)) for name in ("small", "large", "read"))
        answers.add(small, 10)
        answers.add(large, 2 * PROGRESS)
        answers.add(read, 10)
        read.ends[0](None)
        while len({peer for peer, _ in closed}) < 2:
            now += 0.01
            await asyncio.sleep(0)
        first = {peer: next(at for name, at in closed if name == peer) for peer in (small.name, large.name)}
        assert 2.0 <= first[small.name] < 3.0 and 6.0 <= first[large.name] < 7.0
        assert len(first) == len({peer for peer, _ in closed}), "what was read is not late"
        for each in (small, large):
            each.ends[0](None)
        while answers._timer is not None:
            now += 0.01
            await asyncio.sleep(0)
        assert not answers._waiting and not len(answers._from)

    asyncio.run(main())


def test_unread_answers_of_one_address_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalled_calls, "MAX_UNREAD", 2)

    async def main() -> None:
        answers = UnreadAnswers(PATIENCE)
        held = [cast(Any, Answered(str(number))) for number in range(2)]
        for each in held:
            answers.add(each, 0)
        with pytest.raises(Busy):
            answers.add(held[0], 0)
        with pytest.raises(Busy), answers.sending(held[0]):
            pass
        held[0].ends[0](None)
        with answers.sending(held[0]):
            assert answers._from.total == 2
        assert answers._from.total == 1

    asyncio.run(main())


LIST_SERVICES = b"\x3a\0"
UNREAD_CALLS = {
    "/grpc.health.v1.Health/Check": b"",
    "/grpc.health.v1.Health/Watch": b"",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": LIST_SERVICES,
    f"/{KV}/Get": b"\x12\1k",  # of the key k
}


def test_connection_whose_flow_control_window_is_zero_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped, drop = list[str](), Acceptor.drop

    def noted(self: Acceptor, peer: str, why: str) -> None:
        dropped.append(peer)
        drop(self, peer, why)

    monkeypatch.setattr(Acceptor, "drop", noted)
    no_window = frame(SETTINGS, 0, b"\0\4" + bytes(4))
    with Whole(tmp_path, log=LogConfig(flush_ms=5)) as files, serving(files, stall_seconds=0.2) as client:
        for path, request in UNREAD_CALLS.items():
            sent = frame(HEADERS, END_HEADERS, headers(path), 1)
            sent += frame(0, 0, b"\0" + len(request).to_bytes(4, "big") + request, 1)
            with socket.create_connection(client.server.grpc_addresses[0], PATIENCE) as connection:
                connection.sendall(PREFACE + no_window + frame(SETTINGS, ACK) + sent)
                with contextlib.suppress(ConnectionResetError):
                    while connection.recv(1 << 16):
                        pass
    assert len(set(dropped)) == len(UNREAD_CALLS)


def test_large_request_of_a_stream_is_counted_until_the_stream_ends(tmp_path: Path) -> None:
    padding = b"\xc2\x3e" + b"\x80\x80\x08" + bytes(1 << 17)  # an unknown field
    with Whole(tmp_path, log=LogConfig(flush_ms=5)) as files, serving(files) as client, calling(client) as caller:
        files.run("CREATE TABLE t(k INTEGER PRIMARY KEY, v)")
        before = BODIES.used
        request = message("sochdb.v1.SubscribeRequest")(tables=["t"]).SerializeToString() + padding
        call: Any = caller.channel.unary_stream(SUBSCRIBE)(request, timeout=PATIENCE)
        call.initial_metadata()
        assert BODIES.used == before + len(request)
        call.cancel()
        until(lambda: BODIES.used == before)
