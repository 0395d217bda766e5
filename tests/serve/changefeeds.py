"""A reader of change feeds over a real channel: returns events in order, one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
from tests.suite.deadlines import PATIENCE

from headwater.serve.grpc.messages import message

PATH = "/headwater.v1.ChangeFeedService/ChangeFeed"


def own_message(name: str, **fields: Any) -> Any:
    """Return a message of the package headwater.v1 with these fields."""
    return message(f"headwater.v1.{name}")(**fields)


def span(table: str, start: bytes = b"", end: bytes = b"", **more: Any) -> Any:
    return own_message("KeySpan", table=table, start_key=start, end_key=end, **more)


def at(ts: Any) -> tuple[int, int]:
    """Return a time as a number that can be compared."""
    return ts.ms, ts.counter


class Feed:
    """One open stream; iterate over its events. Iteration raises the error that ended the stream."""

    def __init__(self, channel: grpc.Channel, *, timeout: float = PATIENCE, metadata: Any = (), **fields: Any) -> None:
        call = channel.unary_stream(PATH, response_deserializer=message("headwater.v1.ChangeFeedResponse").FromString)
        request = own_message("ChangeFeedRequest", **fields)
        self.call = call(request.SerializeToString(), timeout=timeout, metadata=metadata)
        self._events = self._flat()

    def _flat(self) -> Iterator[Any]:
        for response in self.call:
            assert response.events, "nothing is sent for nothing"
            yield from response.events

    def __iter__(self) -> Iterator[Any]:
        return self._events

    def __enter__(self) -> Feed:
        self.call.initial_metadata()  # the server knows from where on it follows, or has refused
        return self

    def __exit__(self, *_: object) -> None:
        self.call.cancel()

    def upto(self, kind: str) -> list[Any]:
        """Return the events up to and including the first of that kind."""
        found = []
        for event in self._events:
            found.append(event)
            if event.WhichOneof("event") == kind:
                return found
        raise AssertionError(f"ended without {kind}: {found}")

    def until(self, offset: int) -> list[Any]:
        """Return the events up to and including a checkpoint of the whole stream at or after `offset`."""
        found = []
        for event in self._events:
            found.append(event)
            checkpoint = event.checkpoint
            if event.HasField("checkpoint") and not checkpoint.HasField("span") and checkpoint.offset >= offset:
                return found
        raise AssertionError(f"ended before {offset}: {found}")

    def failure(self) -> tuple[list[Any], grpc.RpcError]:
        """Return the events up to the end, and the error that ended the stream; fail if there is none."""
        found = []
        try:
            for event in self._events:
                found.append(event)
        except grpc.RpcError as error:
            return found, error
        raise AssertionError(f"ended well: {found}")


def values(events: list[Any]) -> list[Any]:
    """Return those of the events that are values."""
    return [event.value for event in events if event.HasField("value")]


def kinds(events: list[Any]) -> list[str]:
    return [event.WhichOneof("event") for event in events]


def row(value: Any) -> Any:
    """Return the row of a value event; None if it was deleted."""
    return json.loads(value.value) if value.HasField("value") else None
