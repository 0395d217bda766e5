"""Health/Watch: a client that reads nothing holds up neither the others nor the stop of the server."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from grpc_health.v1 import health_pb2
from tests.suite.deadlines import PATIENCE

from headwater.serve.grpc.server import _Health
from headwater.serve.limits.limits import Limits

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Context:
    """A call whose messages are taken only while `reads` is set."""

    def __init__(self, *, reads: bool = True) -> None:
        self.reads, self.found = asyncio.Event(), list[int]()
        if reads:
            self.reads.set()

    async def write(self, message: Any) -> None:
        await self.reads.wait()
        self.found.append(message.status)


def test_stalled_health_watcher_does_not_block_others() -> None:
    async def main() -> None:
        health = _Health(cast(Limits, None))
        reads, stalled = Context(), Context(reads=False)
        watching = [asyncio.ensure_future(health._watch("", cast(Any, each))) for each in (stalled, reads)]
        while reads.found != [SERVING]:
            await asyncio.sleep(0)
        await health.enter_graceful_shutdown()
        while reads.found != [SERVING, NOT_SERVING]:
            await asyncio.sleep(0)
        stalled.reads.set()
        while stalled.found != [SERVING, NOT_SERVING]:
            await asyncio.sleep(0)
        for each in watching:
            each.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        assert not health._server_watchers and not health._watcher_count_by_service

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
