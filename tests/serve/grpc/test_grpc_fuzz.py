"""Every method of every service against whatever may come: a status with a meaning, never a defect of ours.

Messages are made from their descriptors, at what is there and at what is not; then as random bytes, cut off, of other
types, and too large. `make soak` sends 10,000 more.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.queries.open_databases import Whole
from tests.serve.grpc_calls import KV, PATIENCE, calling
from tests.serve.server_fixture import Client, serving

from headwater.config import LogConfig
from headwater.feeds.formats.sochdb import varint
from headwater.model.keys.key import encode_key
from headwater.serve.grpc.messages import FOLDER, message, pool

SEED = 20261116
STREAM_SECONDS = 0.4  # a stream without an end is read for so long
MAX_BYTES = 1 << 20
DEFECTS = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.UNAVAILABLE,
}
TEXTS = ("", "main", "default", "t", "u", "kv", "absent", "v > 1", "k = 1 OR", "sub-1", "me", "\0", "ü" * 300, "'; --")
BYTES = (b"", encode_key((1,)), encode_key(("x",)), encode_key((1, None)), b"\xff" * 9, b"key", b"\0")
NUMBERS = (0, 1, 2, 3, 7, 63, 1000, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
SIGNED = (0, 1, -1, 5, 2**31 - 1, -(2**31))


def all_methods() -> list[str]:
    files = descriptor_pb2.FileDescriptorSet.FromString((FOLDER / "protos.bin").read_bytes())
    services = [(file.package, service) for file in files.file for service in file.service]
    return sorted(
        f"{package}.{service.name}/{method.name}" for package, service in services for method in service.method
    )


def described(path: str) -> MethodDescriptor:
    service, _, method = path.partition("/")
    found: MethodDescriptor = pool().FindServiceByName(service).FindMethodByName(method)
    return found


# --- what is sent --------------------------------------------------------------------------------------------------


def value(rng: Random, field: FieldDescriptor, depth: int) -> Any:
    """Return a random value that the field may hold."""
    match field.type:
        case FieldDescriptor.TYPE_MESSAGE:
            return made(rng, field.message_type, depth + 1)
        case FieldDescriptor.TYPE_STRING:
            return rng.choice(TEXTS) if rng.random() < 0.9 else "".join(chr(rng.randrange(1, 0xD800)) for _ in range(9))
        case FieldDescriptor.TYPE_BYTES:
            return rng.choice(BYTES) if rng.random() < 0.7 else rng.randbytes(rng.randrange(40))
        case FieldDescriptor.TYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.TYPE_DOUBLE | FieldDescriptor.TYPE_FLOAT:
            return rng.choice((0.0, 1.5, -1.0, float("inf"), float("nan")))
        case FieldDescriptor.TYPE_UINT32 | FieldDescriptor.TYPE_FIXED32:
            return rng.choice(NUMBERS) % 2**32
        case FieldDescriptor.TYPE_UINT64 | FieldDescriptor.TYPE_FIXED64:
            return rng.choice(NUMBERS)
        case FieldDescriptor.TYPE_INT64 | FieldDescriptor.TYPE_SINT64 | FieldDescriptor.TYPE_SFIXED64:
            return rng.choice((*SIGNED, 2**63 - 1, -(2**63)))
    return rng.choice(SIGNED)  # of enums too: a number that has no name is allowed


def made(rng: Random, kind: Any, depth: int = 0) -> Any:
    """Return a random message of that kind; a field is omitted about every second time."""
    found = message(kind.full_name)()
    for field in kind.fields:
        if rng.random() < 0.4 or (depth > 3 and field.message_type):
            continue
        if field.is_repeated:
            each = [value(rng, field, depth) for _ in range(rng.randrange(4))]
            getattr(found, field.name).extend(each)
        elif field.message_type:
            getattr(found, field.name).CopyFrom(value(rng, field, depth))
        else:
            setattr(found, field.name, value(rng, field, depth))
    return found


def mistyped(rng: Random, kind: Any) -> bytes:
    """Return random fields as bytes: field numbers of the message with any wire type and content."""
    found = b""
    for _ in range(rng.randrange(1, 6)):
        number = rng.choice([field.number for field in kind.fields] or [1])
        wire = rng.randrange(8)
        body = {0: b"\x05", 1: rng.randbytes(8), 2: b"\x03" + rng.randbytes(3), 5: rng.randbytes(4)}
        found += bytes((number % 16 << 3 | wire,)) + body.get(wire, rng.randbytes(2))
    return found


def random_body(rng: Random, kind: Any) -> bytes:
    """Return a body: a random message of that kind, or bytes that are cut, mistyped, huge or random."""
    data: bytes = made(rng, kind).SerializeToString()
    match rng.choices(("made", "random", "cut", "mistyped", "huge"), (12, 3, 4, 4, 1))[0]:
        case "random":
            return rng.randbytes(rng.randrange(200))
        case "cut":
            return data[: rng.randrange(len(data) + 1)]
        case "mistyped":
            return mistyped(rng, kind)
        case "huge":
            size = rng.choice((MAX_BYTES // 2, 2 * MAX_BYTES))
            return data + b"\xfa\x3f" + varint(size) + bytes(size)  # in a field that nobody knows
    return data


# --- the calls -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    log = LogConfig(flush_ms=5, retention_events=50)
    with Whole(tmp_path_factory.mktemp("grpc"), log=log) as whole, serving(whole, max_body_bytes=MAX_BYTES) as found:
        for table in ("t", "u"):
            whole.run(f"CREATE TABLE {table}(k INTEGER PRIMARY KEY, v)")
        for number in range(60):
            whole.run(f"INSERT INTO t(v) VALUES ({number})")
        yield found


def statuses(client: Client, path: str, bodies: list[bytes]) -> list[Any]:
    """Send all bodies at once; return the status of each call."""
    method = described(path)
    with calling(client) as caller:
        if method.server_streaming:
            call: Any = caller.channel.unary_stream(f"/{path}")
            calls = [call(body, timeout=STREAM_SECONDS) for body in bodies]
            for each in calls:
                try:
                    for _ in each:
                        pass
                except grpc.RpcError:
                    pass
        else:
            asked: Any = caller.channel.unary_unary(f"/{path}")
            waits = "wait_ms" in method.input_type.fields_by_name
            calls = [asked.future(body, timeout=STREAM_SECONDS if waits else PATIENCE) for body in bodies]
        return [each.code() for each in calls]


def run(client: Client, path: str, count: int, seed: int) -> None:
    rng, method = Random(seed), described(path)
    print(f"{path} seed {seed}")
    bodies = [b"", *(random_body(rng, method.input_type) for _ in range(count - 1))]
    may_wait = method.server_streaming or "wait_ms" in method.input_type.fields_by_name
    bad = DEFECTS if may_wait else DEFECTS | {grpc.StatusCode.DEADLINE_EXCEEDED}
    for low in range(0, len(bodies), 50):
        some = bodies[low : low + 50]
        for body, status in zip(some, statuses(client, path, some), strict=True):
            assert status not in bad, (status, body[:300])
    with calling(client) as caller:
        asked = health_pb2.HealthCheckRequest(service=path.partition("/")[0])
        answer = health_pb2_grpc.HealthStub(caller.channel).Check(asked, timeout=PATIENCE)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        caller.call(f"{KV}/Get", key=b"k")


@pytest.mark.slow
@pytest.mark.parametrize("path", all_methods())
def test_method_answers_random_requests(client: Client, path: str) -> None:
    run(client, path, 25, SEED)


@pytest.mark.soak(seconds=15)
@pytest.mark.parametrize("path", all_methods())
def test_ten_thousand_hostile_calls_cause_no_internal_error(client: Client, path: str, fresh_number: int) -> None:
    run(client, path, -(-10_000 // len(all_methods())), fresh_number)
