"""Calls and transfers as values: the requests a client sends and how it reads their answers. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from headwater.client.protocol import Request, RetryPolicy, may_repeat
from headwater.client.retry import Backoff
from headwater.errors import HeadwaterError

T = TypeVar("T")


class Call(NamedTuple, Generic[T]):
    """An RPC method with its parameters, and the function that reads its result."""

    method: str
    params: Mapping[str, Any]
    read: Callable[[Any], T]


class Transfer(Generic[T]):
    """Values read over as many connections as needed: a client sends `next` and passes parts of the body to `take`."""

    is_arrow = False  # parts are record batches; else they are bytes
    question: Call[Any] | None = None  # a call to make before the first request

    def __init__(self, parts: Sequence[str], query: Mapping[str, Any], backoff: Backoff) -> None:
        self._parts, self._backoff = parts, backoff
        self._query = {name: value for name, value in query.items() if value is not None}

    def answered(self, found: Any) -> None:
        """Use the result of the call `question`."""

    def next(self) -> Request | None:
        """Return the next request; None when everything was read."""
        raise NotImplementedError

    def take(self, part: Any) -> Iterator[T]:
        """Yield the values that `part` completes; raise the error it reports."""
        raise NotImplementedError

    def finished(self) -> float:
        """Note that the body was complete; return the seconds to wait before `next`."""
        return 0.0

    def failed(self, error: HeadwaterError) -> float:
        """Return the seconds to wait before `next`; raise `error` if a retry is of no use."""
        if not may_repeat(RetryPolicy.ANY, error):
            raise error
        return self._backoff.wait(error)

    def rest(self) -> Iterator[T]:
        """Yield the values that are due after a connection has ended."""
        return iter(())
