"""Calls of any method of ours over a real channel, by the messages of the pool."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grpc
from tests.suite.deadlines import PATIENCE

from headwater.serve.grpc.messages import message, pool

if TYPE_CHECKING:
    from tests.serve.server_fixture import Client

SUBSCRIPTIONS, KV = "sochdb.v1.SubscriptionService", "sochdb.v1.KvService"


class Reading:
    """An open stream of messages."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def opened(self) -> Reading:
        """Wait until the stream is open: no later change is missed."""
        self.call.initial_metadata()
        return self

    def take(self, count: int) -> list[Any]:
        """Return the next `count` messages."""
        return [next(self.call) for _ in range(count)]

    def rest(self) -> list[Any]:
        """Return all messages until the stream ends; raise its error if it fails."""
        return list(self.call)

    def failure(self) -> grpc.RpcError:
        """Read to the end and return the error of the stream; fail if it has none."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError as error:
            return error
        raise AssertionError("it ended well")


OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
    ("grpc.http2.bdp_probe", 0),  # what nobody reads stays with the server: the window does not grow
    ("grpc.max_receive_message_length", -1),
]


class Caller:
    """Calls methods, each named `package.Service/Method`."""

    def __init__(self, address: str, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self.channel = grpc.insecure_channel(address, OPTIONS)
        self.metadata = metadata

    def call(self, path: str, **fields: Any) -> Any:
        """Return the answer of a call."""
        asked, answer = _kinds(path)
        call = self.channel.unary_unary(f"/{path}", response_deserializer=answer.FromString)
        return call(asked(**fields).SerializeToString(), timeout=PATIENCE, metadata=self.metadata)

    def stream(self, path: str, **fields: Any) -> Reading:
        """Return an open stream of answers."""
        asked, answer = _kinds(path)
        call = self.channel.unary_stream(f"/{path}", response_deserializer=answer.FromString)
        return Reading(call(asked(**fields).SerializeToString(), timeout=PATIENCE, metadata=self.metadata))

    def subscribe(self, **fields: Any) -> Reading:
        """Return an open subscription."""
        return self.stream(f"{SUBSCRIPTIONS}/Subscribe", **fields).opened()

    def watch(self, **fields: Any) -> Reading:
        """Return an open watch."""
        return self.stream(f"{SUBSCRIPTIONS}/WatchKey", **fields).opened()

    def refusal(self, path: str, **fields: Any) -> grpc.RpcError:
        """Return the error of a call of any kind; fail if it succeeds."""
        service, _, method = path.partition("/")
        if pool().FindServiceByName(service).FindMethodByName(method).server_streaming:
            return self.stream(path, **fields).failure()
        try:
            self.call(path, **fields)
        except grpc.RpcError as error:
            return error
        raise AssertionError("it was answered")


def _kinds(path: str) -> tuple[Any, Any]:
    service, _, method = path.partition("/")
    described = pool().FindServiceByName(service).FindMethodByName(method)
    return message(described.input_type.full_name), message(described.output_type.full_name)


@contextlib.contextmanager
def calling(client: Client, *metadata: tuple[str, str]) -> Iterator[Caller]:
    """Yield a caller of the server of `client`."""
    found = Caller(client.server.grpc_address, metadata)
    with found.channel:
        yield found
