"""AsyncClient: the same as Client for asyncio, on httpx."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any, TypeVar

import httpx

from headwater.client.arrow_stream import BatchParser, ReceivedBatch
from headwater.client.methods import Methods
from headwater.client.protocol import (
    Request,
    broken,
    distrusted,
    may_repeat,
    refusal,
    rpc_request,
    rpc_result,
    unreachable,
)
from headwater.client.tls_trust import tls_context
from headwater.client.transfer import Call, Transfer
from headwater.errors import HeadwaterError, Unavailable

T = TypeVar("T")
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts no authority, and takes no time to load any


class AsyncClient(Methods, AbstractAsyncContextManager["AsyncClient"]):
    """A client of one server. Methods, retries and errors are those of Client. Tasks of one loop may share it."""

    def _connect(self, timeout: float, tls: ssl.SSLContext | None) -> None:
        self._timeout = timeout
        credential = {} if self._token is None else {"authorization": f"Bearer {self._token}"}
        self._http = httpx.AsyncClient(
            base_url=self._server.url,
            headers={"accept-encoding": "identity"} | credential,
            verify=tls or (tls_context() if self._server.scheme == "https" else NO_TLS),
            trust_env=False,  # neither a proxy nor a netrc of the environment gets the credential
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=8),
        )

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def call(self, method: str, **params: Any) -> Any:
        """Return the result of an RPC method; raise the server's error as the class with its code."""
        request = rpc_request(method, params)
        tries = self._backoff()
        while True:
            try:
                async with self._send(request) as response:
                    return rpc_result(response.status_code, response.headers, await _body(response))
            except HeadwaterError as error:
                if not may_repeat(request.repeat, error):
                    raise
                wait = tries.wait(error)
            await asyncio.sleep(wait)

    async def _carry_out(self, call: Call[T]) -> T:
        return call.read(await self.call(call.method, **call.params))

    async def _transfer(self, transfer: Transfer[T]) -> AsyncGenerator[T]:
        if transfer.question is not None:
            transfer.answered(await self._carry_out(transfer.question))
        while (request := transfer.next()) is not None:
            try:
                async with aclosing(self._batches(request) if transfer.is_arrow else self._pieces(request)) as parts:
                    async for part in parts:
                        for value in transfer.take(part):
                            yield value
                wait = transfer.finished()
            except HeadwaterError as error:
                wait = transfer.failed(error)
            for value in transfer.rest():
                yield value
            await asyncio.sleep(wait)

    async def _batches(self, request: Request) -> AsyncGenerator[ReceivedBatch]:
        parser = BatchParser()
        try:
            async with aclosing(self._pieces(request)) as pieces:
                async for piece in pieces:
                    for batch in parser.take(piece):
                        yield batch
        except Unavailable:
            if not parser.ended:
                raise
        if not parser.ended:
            raise broken()

    async def _pieces(self, request: Request) -> AsyncGenerator[bytes]:
        """Yield the body of a response with status 200 until its end; raise the error of any other response."""
        async with self._send(request) as response:
            if response.status_code != 200:
                raise refusal(response.status_code, response.headers, await _body(response))
            try:
                async for piece in response.aiter_raw():
                    yield piece
            except httpx.TransportError as error:
                raise broken(error) from None

    @asynccontextmanager
    async def _send(self, request: Request) -> AsyncGenerator[httpx.Response]:
        timeout = httpx.Timeout(self._timeout, read=self._timeout + request.wait_seconds)
        built = self._http.build_request(
            request.method, request.path, content=request.body, headers=request.headers, timeout=timeout
        )
        try:
            response = await self._http.send(built, stream=True)
        except httpx.TransportError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise distrusted(self._server, error) from None
            raise unreachable(self._server, error, sent=not isinstance(error, NOT_SENT)) from None
        try:
            yield response
        finally:
            await response.aclose()


async def _body(response: httpx.Response) -> bytes:
    try:
        return await response.aread()
    except httpx.TransportError as error:
        raise broken(error) from None
