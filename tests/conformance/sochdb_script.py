"""Runs with SochDB's own client: `sochdb_script.py ADDRESS KEY`. Uses its stubs, and prints what arrives as one JSON
object.

The server has a table `orders` with three rows, written at offsets 2 to 4, and keeps 100 changes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import grpc
from sochdb.proto import sochdb_pb2 as pb  # type: ignore[import-not-found]
from sochdb.proto import sochdb_pb2_grpc as stubs

SECONDS = 60.0


def as_json(event: Any) -> dict[str, Any]:
    """Return a message as JSON, with bytes as latin-1."""
    found = {field.name: getattr(event, field.name) for field in event.DESCRIPTOR.fields}
    return {
        name: value.decode("latin-1") if isinstance(value, bytes) else value
        for name, value in found.items()
        if isinstance(value, (bytes, str, int, bool))
    }


def failed(call: Callable[[], Any]) -> dict[str, Any]:
    """Return code, details and trailers of a failed call."""
    try:
        found = call()
        list(found) if hasattr(found, "__next__") else None
    except grpc.RpcError as error:
        trailers = {name: value for name, value in error.trailing_metadata() if isinstance(value, str)}
        return {"code": error.code().name, "details": error.details(), "trailers": trailers}
    raise AssertionError("it was answered")


class Session:
    """Stubs over one channel, with a credential."""

    def __init__(self, channel: grpc.Channel, *metadata: tuple[str, str]) -> None:
        self.subscriptions = stubs.SubscriptionServiceStub(channel)
        self.kv = stubs.KvServiceStub(channel)
        self._more: dict[str, Any] = {"timeout": SECONDS, "metadata": metadata}

    def subscribe(self, **fields: Any) -> Any:
        return self.subscriptions.Subscribe(pb.SubscribeRequest(**fields), **self._more)

    def watch(self, **fields: Any) -> Any:
        return self.subscriptions.WatchKey(pb.WatchKeyRequest(**fields), **self._more)

    def listed(self, namespace: str = "") -> list[dict[str, Any]]:
        answer = self.subscriptions.ListSubscriptions(pb.ListSubscriptionsRequest(namespace=namespace), **self._more)
        return [{**as_json(each), "tables": list(each.tables)} for each in answer.subscriptions]

    def cancel(self, id: str) -> dict[str, Any]:
        asked = pb.CancelSubscriptionRequest(subscription_id=id)
        return as_json(self.subscriptions.CancelSubscription(asked, **self._more))

    def call(self, name: str, request: Any) -> Any:
        return getattr(self.kv, name)(request, **self._more)

    def put(self, key: bytes, value: bytes, **more: Any) -> dict[str, Any]:
        return as_json(self.call("Put", pb.KvPutRequest(namespace="default", key=key, value=value, **more)))

    def get(self, key: bytes) -> dict[str, Any]:
        return as_json(self.call("Get", pb.KvGetRequest(namespace="default", key=key)))


def rows(session: Session) -> Any:
    """Subscribe from an offset, inclusive; return three events."""
    stream = session.subscribe(namespace="default", tables=["orders"], start_sequence=2)
    found = [as_json(next(stream)) for _ in range(3)]
    stream.cancel()
    return found


def predicate(session: Session) -> Any:
    asked = {"tables": ["orders"], "where_predicate": "id > 2", "start_sequence": 1, "batch_size": 2}
    stream = session.subscribe(**asked, operations=[pb.OPERATION_INSERT])
    found = as_json(next(stream))
    stream.cancel()
    return found


def pairs(session: Session) -> Any:
    """Subscribe and watch a key while keys are written."""
    stream = session.subscribe(namespace="default", tables=["kv"])
    watch = session.watch(namespace="default", table="kv", key=b"user:\xff")
    stream.initial_metadata()
    watch.initial_metadata()
    session.put(b"user:\xff", b"one")
    session.put(b"other", b"x")
    session.put(b"user:\xff", b"two")
    session.call("Delete", pb.KvDeleteRequest(key=b"user:\xff"))
    found = {"events": [as_json(next(stream)) for _ in range(5)], "watched": [as_json(next(watch)) for _ in range(3)]}
    stream.cancel()
    watch.cancel()
    return found


def store(session: Session) -> Any:
    entries = [pb.KvPutEntry(key=b"s:%d" % number, value=b"v%d" % number) for number in (2, 1)]
    return {
        "put": session.put(b"s:3", b"\0\xff", ttl_seconds=600),
        "get": session.get(b"s:3"),
        "absent": session.get(b"s:9"),
        "batch": as_json(session.call("BatchPut", pb.KvBatchPutRequest(entries=entries))),
        "scan": [as_json(each) for each in session.call("Scan", pb.KvScanRequest(prefix=b"s:", limit=2))],
        "many": [
            as_json(each) for each in session.call("BatchGet", pb.KvBatchGetRequest(keys=[b"s:2", b"no"])).entries
        ],
        "deleted": [as_json(session.call("Delete", pb.KvDeleteRequest(key=b"s:3"))) for _ in range(2)],
        "namespace": failed(lambda: session.call("Get", pb.KvGetRequest(namespace="absent", key=b"k"))),
    }


def ended(session: Session) -> Any:
    """Return the open subscriptions once the server has ended the cancelled ones."""
    until = time.monotonic() + 60
    while (found := session.listed()) and time.monotonic() < until:
        time.sleep(0.01)
    return found


def listing(session: Session) -> Any:
    before = ended(session)
    stream = session.subscribe(namespace="default", tables=["orders"], start_sequence=3)
    stream.initial_metadata()
    (during,) = session.listed("default")
    answers = [session.cancel(during["subscription_id"]) for _ in range(2)]
    rest = [as_json(each) for each in stream]
    return {
        "before": before,
        "during": during,
        "cancelled": answers,
        "rest": len(rest),
        "code": stream.code().name,
        "after": ended(session),
    }


def overrun(session: Session) -> Any:
    for number in range(150):
        session.put(b"many", b"%d" % number)
    return failed(lambda: session.subscribe(start_sequence=1))


def doors(channel: grpc.Channel, key: str) -> Any:
    nobody, header = Session(channel), Session(channel, ("x-api-key", key))
    return {
        "kv": failed(lambda: nobody.get(b"k")),
        "stream": failed(lambda: nobody.subscribe()),
        "wrong": failed(lambda: Session(channel, ("authorization", "Bearer wrong")).get(b"k")),
        "by x-api-key": header.listed(),
    }


def main(address: str, key: str) -> None:
    """Run every scene in turn and print the results."""
    with grpc.insecure_channel(address) as channel:
        session = Session(channel, ("authorization", f"Bearer {key}"))
        scenes = {each.__name__: each(session) for each in (rows, predicate, listing, pairs, store, overrun)}
        print(json.dumps({**scenes, "doors": doors(channel, key)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
