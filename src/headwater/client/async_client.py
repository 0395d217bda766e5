"""AsyncClient: the same as Client for asyncio, on httpx."""

from __future__ import annotations

import asyncio
import os
import random
import ssl
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx

from headwater.client.arrow_stream import Fed, Kept, Told
from headwater.client.protocol import (
    Request,
    broken,
    distrusted,
    may_repeat,
    ranges_of,
    read,
    refusal,
    rpc_request,
    rpc_result,
    unreachable,
)
from headwater.client.pull_state import Pull
from headwater.client.request_base import Asking, check_follow, page_of
from headwater.client.responses import Described, Page, Range, Registered, Subscribed
from headwater.client.sse import Feed, Following
from headwater.client.tls_trust import trusting
from headwater.errors import HeadwaterError, OffsetExpired, Unavailable
from headwater.model.keys.key import Span

if TYPE_CHECKING:
    import pyarrow as pa

NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody, and takes no time to load authorities


class AsyncClient:
    """One server. See Client: methods, retries and errors are the same. Tasks of one loop may share it."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        token_file: str | os.PathLike[str] | None = None,
        timeout: float = 60.0,
        patience: float = 60.0,
        random: random.Random | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._asking = Asking(url, token, token_file, patience, random)
        self._timeout = timeout
        token = self._asking.token
        self._http = httpx.AsyncClient(
            base_url=self._asking.server.url,
            headers={"accept-encoding": "identity"} | ({} if token is None else {"authorization": f"Bearer {token}"}),
            verify=tls or (trusting() if self._asking.server.scheme == "https" else NO_TLS),
            trust_env=False,  # neither a proxy nor a netrc of the environment gets the credential
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=8),
        )

    def __repr__(self) -> str:
        return f"AsyncClient({self._asking.server.url!r})"

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Let the connections go."""
        await self._http.aclose()

    # --- calls -------------------------------------------------------------------------------------------

    async def call(self, method: str, **params: Any) -> Any:
        """The result of an RPC method; its error is raised as the class with its code."""
        request = rpc_request(method, params)
        tries = self._asking.patience()
        while True:
            try:
                async with self._asked(request) as response:
                    return rpc_result(response.status_code, response.headers, await _whole(response))
            except HeadwaterError as error:
                if not may_repeat(request.repeat, error):
                    raise
                wait = tries.wait(error)
            await asyncio.sleep(wait)

    async def describe(
        self,
        db: str,
        table: str,
        after: int | None = None,
        wait_ms: int = 0,
        shape: int | None = None,
        step: tuple[int, int] | None = None,
    ) -> Described:
        """As Client.describe."""
        rows, size = step or (None, None)
        asked = {"after": after, "wait_ms": wait_ms or None, "shape": shape, "step_rows": rows, "step_bytes": size}
        return read(await self.call("pull.describe", db=db, table=table, **asked), Described)

    async def ranges(self, db: str, table: str, target_bytes: int | None = None) -> list[Range]:
        """As Client.ranges."""
        found = await self.call("pull.ranges", db=db, table=table, target_bytes=target_bytes)
        return ranges_of(found["ranges"])

    async def register(
        self,
        db: str,
        table: str,
        subscriber: str,
        range: int | None = None,
        epoch: int | None = None,
        keep: int | None = None,
    ) -> Registered:
        """As Client.register."""
        asked = {"subscriber": subscriber, "range": range, "epoch": epoch, "keep": keep}
        return read(await self.call("pull.register", db=db, table=table, **asked), Registered)

    async def release(self, db: str, table: str, subscriber: str) -> None:
        """As Client.release."""
        await self.call("pull.release", db=db, table=table, subscriber=subscriber)

    # --- bulk --------------------------------------------------------------------------------------------

    async def snapshot(
        self,
        db: str,
        table: str,
        *,
        version: str | None = None,
        span: Span | None = None,
        columns: Sequence[str] = (),
        where: str | None = None,
        ranges: Sequence[Range] = (),
    ) -> AsyncGenerator[pa.RecordBatch]:
        """As Client.snapshot."""
        version = version or (await self.describe(db, table)).version
        pull = self._asking.snapshot(db, table, version, span or Span.all(), columns, where, ranges)
        async with aclosing(self._batches(pull)) as batches:
            async for batch in batches:
                yield batch

    def log(
        self,
        db: str,
        table: str,
        *,
        generation: str,
        after: int,
        upto: int,
        span: Span | None = None,
        shape: int | None = None,
        columns: Sequence[str] = (),
        where: str | None = None,
    ) -> AsyncGenerator[pa.RecordBatch]:
        """As Client.log."""
        return self._batches(self._asking.log(db, table, generation, after, upto, span, shape, columns, where))

    def log_tables(
        self, db: str, tables: Sequence[str], *, generation: str, after: int, upto: int
    ) -> AsyncGenerator[pa.RecordBatch]:
        """As Client.log_tables."""
        return self._batches(self._asking.log_tables(db, tables, generation, after, upto))

    async def _batches(self, pull: Pull) -> AsyncGenerator[pa.RecordBatch]:
        kept = Kept()
        while (request := pull.next()) is not None:
            try:
                async with aclosing(self._arrow(request)) as arrow:
                    async for told in arrow:
                        pull.took(told)
                        for batch in kept.rows(told):
                            yield batch
                pull.finished()
                continue
            except HeadwaterError as error:
                wait = pull.failed(error)
            await asyncio.sleep(wait)
        for batch in kept.rest():
            yield batch

    async def _arrow(self, request: Request) -> AsyncGenerator[Told]:
        fed = Fed()
        try:
            async with aclosing(self._pieces(request)) as pieces:
                async for piece in pieces:
                    for told in fed.take(piece):
                        yield told
        except Unavailable:
            if not fed.ended:
                raise
        if not fed.ended:
            raise broken()

    # --- feeds -------------------------------------------------------------------------------------------

    async def subscribe_table(self, **options: Any) -> Subscribed:
        """As Client.subscribe_table."""
        return read(await self.call("cdc.subscribe_table", **options), Subscribed)

    async def poll(
        self,
        sub_id: str,
        *,
        from_offset: int | None = None,
        cursor: str | None = None,
        limit: int | None = None,
        wait_ms: int = 0,
    ) -> Page:
        """As Client.poll."""
        asked = {"from_offset": from_offset, "cursor": cursor, "limit": limit, "wait_ms": wait_ms or None}
        return page_of(await self.call("cdc.poll", sub_id=sub_id, **asked))

    async def ack(self, sub_id: str, offset: int | None = None, *, cursor: str | None = None) -> int:
        """As Client.ack."""
        return int((await self.call("cdc.ack", sub_id=sub_id, offset=offset, cursor=cursor))["acked_offset"])

    def stream(
        self, sub_id: str, *, from_offset: int | None = None, control: Collection[str] = ()
    ) -> AsyncGenerator[dict[str, Any]]:
        """As Client.stream."""
        return self._told(self._asking.stream(sub_id, from_offset, control))

    def changes(
        self, db: str, table: str | None = None, *, control: Collection[str] = (), **filters: Any
    ) -> AsyncGenerator[dict[str, Any]]:
        """As Client.changes."""
        return self._told(self._asking.changes(db, table, control, filters))

    async def follow(self, db: str, table: str, **filters: Any) -> AsyncGenerator[tuple[str, Any]]:
        """As Client.follow."""
        check_follow(filters)
        tries = self._asking.patience()
        while True:
            following = Following()
            try:
                begun = self._asking.changes(db, table, (), {**filters, "start": "snapshot"})
                async with aclosing(self._told(begun)) as feed:
                    async for told in feed:
                        tries.progress()
                        for one in following.sort(told):
                            yield one
                        if following.restart:
                            break
                yield "resnapshot", following.restart
                continue
            except OffsetExpired as error:
                wait, reason = tries.wait(error), error.extra.get("resnapshot_reason") or error.code
            yield "resnapshot", reason
            await asyncio.sleep(wait)

    async def _told(self, feed: Feed) -> AsyncGenerator[dict[str, Any]]:
        while (request := feed.next()) is not None:
            try:
                async with aclosing(self._pieces(request)) as pieces:
                    async for piece in pieces:
                        for told in feed.take(piece):
                            yield told
                wait = feed.finished()
            except HeadwaterError as error:
                wait = feed.failed(error)
            await asyncio.sleep(wait)

    # --- HTTP --------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _asked(self, request: Request) -> AsyncGenerator[httpx.Response]:
        timeout = httpx.Timeout(self._timeout, read=self._timeout + request.patience)
        built = self._http.build_request(
            request.method, request.path, content=request.body, headers=request.headers, timeout=timeout
        )
        try:
            response = await self._http.send(built, stream=True)
        except httpx.TransportError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise distrusted(self._asking.server, error) from None
            raise unreachable(self._asking.server, error, sent=not isinstance(error, NOT_SENT)) from None
        try:
            yield response
        finally:
            await response.aclose()

    async def _pieces(self, request: Request) -> AsyncGenerator[bytes]:
        """The body of an answer with status 200, until the end of a whole one; any other is raised."""
        async with self._asked(request) as response:
            if response.status_code != 200:
                raise refusal(response.status_code, response.headers, await _whole(response))
            try:
                async for piece in response.aiter_raw():
                    yield piece
            except httpx.TransportError as error:
                raise broken(error) from None


async def _whole(response: httpx.Response) -> bytes:
    try:
        return await response.aread()
    except httpx.TransportError as error:
        raise broken(error) from None
