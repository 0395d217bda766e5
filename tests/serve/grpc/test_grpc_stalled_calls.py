"""Callers of gRPC that leave, or leave their answers unread: let go, and no defect of the server."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from grpc._cython import cygrpc
from tests.queries.open_databases import Whole
from tests.serve.changefeeds import made
from tests.serve.grpc_calls import SUBSCRIPTIONS, calling
from tests.serve.server_fixture import Client, serving
from tests.suite.deadlines import PATIENCE

from headwater.config import FeedsConfig, LogConfig
from headwater.errors import HeadwaterError, Unavailable
from headwater.model.principal import ANONYMOUS
from headwater.serve.api import Api
from headwater.serve.grpc import calls
from headwater.serve.grpc.calls import Caller, _Call
from headwater.serve.grpc.changefeed import ChangeFeedService
from headwater.serve.grpc.messages import message
from headwater.serve.grpc.stalled_calls import StalledCalls
from headwater.serve.metrics.changefeed_metrics import ChangefeedCounters
from headwater.serve.thread_bridge import Bridge

SUBSCRIBE = f"/{SUBSCRIPTIONS}/Subscribe"


class Pouring:
    """A call whose caller does what is said."""

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


def test_only_a_message_unread_for_too_long_ends_the_call() -> None:
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
        assert reader.call is not None
        files.run("INSERT INTO u VALUES (1, 1)")
        assert len(quiet.take(1)) == 1, "who has nothing to read is not late"


class Gone:
    """The context of a call whose caller left in the midst of a message."""

    async def write(self, message: Any) -> None:
        raise cygrpc.ExecuteBatchError("Failed grpc_call_start_batch")


class Counted:
    """What calls became."""

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
        asked = made("ChangeFeedRequest", base_offset=0, generation="of another log")
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
