"""Client: calls and iterators that block."""

from __future__ import annotations

import ssl
import time
from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from headwater.client.http_connections import Connections
from headwater.client.methods import Methods
from headwater.client.protocol import may_repeat, rpc_request, rpc_result
from headwater.client.transfer import Call, Transfer
from headwater.errors import HeadwaterError

T = TypeVar("T")


class Client(Methods, AbstractContextManager["Client"]):
    """A client of one server. It keeps its connections open until `close`. Not thread-safe: create one per thread.

    Transient failures (no connection, 503, 429, a truncated body) are retried with jitter until `patience` seconds
    passed without progress; then the last error is raised. A write is sent again only if the server surely did not
    carry it out.
    """

    def _connect(self, timeout: float, tls: ssl.SSLContext | None) -> None:
        self._connections = Connections(self._server, self._token, timeout, tls)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()

    def call(self, method: str, **params: Any) -> Any:
        """Return the result of an RPC method; raise the server's error as the class with its code."""
        request = rpc_request(method, params)
        tries = self._backoff()
        while True:
            try:
                return rpc_result(*self._connections.exchange(request))
            except HeadwaterError as error:
                if not may_repeat(request.repeat, error):
                    raise
                wait = tries.wait(error)
            time.sleep(wait)

    def _carry_out(self, call: Call[T]) -> T:
        return call.read(self.call(call.method, **call.params))

    def _transfer(self, transfer: Transfer[T]) -> Generator[T]:
        if transfer.question is not None:
            transfer.answered(self._carry_out(transfer.question))
        while (request := transfer.next()) is not None:
            try:
                with self._connections.opened(request) as response:
                    for part in response.batches() if transfer.is_arrow else response.pieces():
                        yield from transfer.take(part)
                wait = transfer.finished()
            except HeadwaterError as error:
                wait = transfer.failed(error)
            yield from transfer.rest()
            time.sleep(wait)
