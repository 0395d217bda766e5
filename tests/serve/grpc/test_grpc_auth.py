"""Authorization over gRPC: every method against every kind of principal, and streams that end with a credential."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest
from google.protobuf import descriptor_pb2
from tests.queries.open_databases import Whole
from tests.serve.grpc_calls import KV, PATIENCE, SUBSCRIPTIONS, Caller, calling
from tests.serve.server_fixture import Client, serving
from tests.suite.deadlines import KEY_LIFETIME, wait_until

from headwater.config import Secret
from headwater.errors import Forbidden, LimitExceeded
from headwater.model.keys.key import encode_key
from headwater.serve.grpc import errors
from headwater.serve.grpc.messages import FOLDER, pool

ADMIN, SECRET = "admin-token", "a secret of more than thirty-two bytes"
PULL, FEED = "headwater.v1.PullService", "headwater.v1.ChangeFeedService"
NOBODY = "Authentication required. Provide a Bearer token or API key."
PEOPLE = {  # name -> role and scopes
    "all": ("owner", None),
    "main": ("owner", ["main"]),
    "shop": ("owner", ["shop"]),
    "table": ("editor", ["shop.a"]),
    "pairs": ("editor", ["shop.kv"]),
    "viewer": ("viewer", ["shop"]),
    "nowhere": ("owner", ["elsewhere"]),
}
ANYBODY = frozenset(PEOPLE)
WHOLE = frozenset({"all", "shop"})
READS = WHOLE | {"viewer"}
READS_A = READS | {"table"}
KNOWS = READS_A | {"pairs"}  # that there is a database shop
SHOP = {"namespace": "shop"}
RANGE = {"RANGE": "b"}  # stands for a range of the table
CALLS: list[tuple[str, dict[str, Any], frozenset[str]]] = [  # method, fields, who is not refused
    (f"{SUBSCRIPTIONS}/Subscribe", {**SHOP, "tables": ["a"]}, READS_A),
    (f"{SUBSCRIPTIONS}/Subscribe", {**SHOP, "tables": ["a", "b"]}, READS),
    (f"{SUBSCRIPTIONS}/Subscribe", SHOP, READS),
    (f"{SUBSCRIPTIONS}/WatchKey", {**SHOP, "table": "a"}, READS_A),
    (f"{SUBSCRIPTIONS}/WatchKey", {**SHOP, "table": "b"}, READS),
    (f"{SUBSCRIPTIONS}/WatchKey", SHOP, READS),
    (f"{SUBSCRIPTIONS}/ListSubscriptions", SHOP, KNOWS),
    (f"{SUBSCRIPTIONS}/ListSubscriptions", {}, ANYBODY),
    (f"{SUBSCRIPTIONS}/CancelSubscription", {"subscription_id": "sub-0"}, ANYBODY),
    (f"{KV}/Get", {**SHOP, "key": b"k"}, READS | {"pairs"}),
    (f"{KV}/Put", {**SHOP, "key": b"k", "value": b"v"}, WHOLE | {"pairs"}),
    (f"{KV}/Delete", {**SHOP, "key": b"k"}, WHOLE | {"pairs"}),
    (f"{KV}/Scan", SHOP, READS | {"pairs"}),
    (f"{KV}/BatchGet", {**SHOP, "keys": [b"k"]}, READS | {"pairs"}),
    (f"{KV}/BatchPut", {**SHOP, "entries": [{"key": b"k"}]}, WHOLE | {"pairs"}),
    (f"{PULL}/ListRanges", {"db": "shop", "table": "a"}, READS_A),
    (f"{PULL}/ListRanges", {"db": "shop", "table": "b"}, READS),
    (f"{PULL}/CdcRegister", RANGE, READS),
    (f"{PULL}/CdcPullSnapshot", RANGE, READS),
    (f"{PULL}/CdcPullLog", RANGE, READS),
    (f"{FEED}/ChangeFeed", {"db": "shop", "spans": [{"table": "a"}]}, READS_A),
    (f"{FEED}/ChangeFeed", {"db": "shop", "spans": [{"table": "a"}, {"table": "b"}]}, READS),
    (f"{FEED}/ChangeFeed", {"db": "shop"}, READS),
]


def all_methods() -> set[str]:
    """Return the paths of all methods in the .proto files."""
    files = descriptor_pb2.FileDescriptorSet.FromString((FOLDER / "protos.bin").read_bytes())
    services = [(file.package, service) for file in files.file for service in file.service]
    return {f"{package}.{service.name}/{method.name}" for package, service in services for method in service.method}


class World:
    """A server with credentials, the databases main and shop, and a caller for each principal."""

    def __init__(self, client: Client, files: Whole) -> None:
        self.client, self.files = client, files
        client.http.headers["x-api-key"] = ADMIN
        made = {
            name: client.ok("security.token.create", name=name, role=role, **({"scopes": scopes} if scopes else {}))
            for name, (role, scopes) in PEOPLE.items()
        }
        self.tokens = {name: key["token"] for name, key in made.items()}

    @contextlib.contextmanager
    def caller(self, token: str, header: str = "authorization") -> Iterator[Caller]:
        said = token if header == "x-api-key" else f"Bearer {token}"
        with calling(self.client, (header, said)) as found:
            yield found

    def fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        if "RANGE" not in fields:
            return fields
        with self.caller(ADMIN) as admin:
            one = admin.call(f"{PULL}/ListRanges", db="shop", table=fields["RANGE"]).ranges[0]
        return {"range_id": one.id, "range_epoch": one.range_epoch, "subscriber_name": "me"}

    def is_refused(self, caller: Caller, path: str, fields: dict[str, Any]) -> bool:
        service, _, method = path.partition("/")
        try:
            if pool().FindServiceByName(service).FindMethodByName(method).server_streaming:
                reading = caller.stream(path, **fields).opened()
                for table in ("a", "b"):
                    self.files.run(f"INSERT INTO {table}(v) VALUES ('x')", db="shop")
                next(reading.call, None)
                reading.call.cancel()
                return False
            answer = caller.call(path, **fields)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.PERMISSION_DENIED, error
            return True
        failed = "error" in answer.DESCRIPTOR.fields_by_name and answer.error
        return bool(failed) and not isinstance(failed, str) and failed.HasField("range_not_found")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = Path(tmp_path_factory.mktemp("doors"))
    with Whole(folder) as files:
        files.create("shop")
        for table in ("a", "b"):
            files.run(f"CREATE TABLE {table}(k INTEGER PRIMARY KEY, v TEXT)", db="shop")
        settings = {"token": Secret(ADMIN), "jwt_secret": Secret(SECRET)}
        with serving(files, folder=folder, **settings) as client:
            yield World(client, files)


def test_calls_of_the_test_include_every_grpc_method() -> None:
    assert {path for path, _, _ in CALLS} == all_methods()


@pytest.mark.parametrize(("path", "fields", "may"), CALLS, ids=lambda each: each if isinstance(each, str) else "")
def test_method_refuses_exactly_the_callers_without_the_right(
    world: World, path: str, fields: dict[str, Any], may: frozenset[str]
) -> None:
    asked = world.fields(fields)
    for name, token in world.tokens.items():
        with world.caller(token) as caller:
            assert world.is_refused(caller, path, asked) == (name not in may), name


@pytest.mark.parametrize("path", sorted(all_methods() | {"no.such.Service/Method"}))
def test_unauthenticated_call_gets_the_same_error_everywhere(world: World, path: str) -> None:
    for metadata in (
        (),
        (("authorization", "Bearer wrong"),),
        (("x-api-key", ADMIN[:-1]),),
        (("authorization", ADMIN),),
    ):
        with calling(world.client, *metadata) as caller:
            with pytest.raises(grpc.RpcError) as failure:
                caller.channel.unary_unary(f"/{path}")(b"\xff" * 50, timeout=PATIENCE, metadata=metadata)
            assert failure.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert failure.value.details() == NOBODY


def wait_until_none_is_listed(caller: Caller) -> None:
    """Wait until the server has ended the streams that other tests cancelled."""
    listing = f"{SUBSCRIPTIONS}/ListSubscriptions"
    wait_until(lambda: not caller.call(listing).subscriptions, "no subscription is listed")


# --- credentials of every kind -------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
@pytest.mark.parametrize("kind", ["admin", "key", "jwt"])
def test_every_credential_is_accepted_in_either_header(world: World, header: str, kind: str) -> None:
    """SochDB tries JWTs first, and never API keys."""
    signed = jwt.encode({"sub": "ann", "role": "Viewer", "exp": int(time.time()) + 600}, SECRET, "HS256")
    token = {"admin": ADMIN, "key": world.tokens["all"], "jwt": signed}[kind]
    with world.caller(token, header) as caller:
        wait_until_none_is_listed(caller)


def test_expired_token_is_reported_as_expired(world: World) -> None:
    token = jwt.encode({"sub": "ann", "exp": int(time.time()) - 600}, SECRET, "HS256")
    with world.caller(token) as caller:
        failure = caller.refusal(f"{KV}/Get", key=b"k")
    assert failure.code() is grpc.StatusCode.UNAUTHENTICATED
    assert failure.details() == "Authentication token has expired."


def test_forbidden_call_names_the_missing_right(world: World) -> None:
    with world.caller(world.tokens["viewer"]) as caller:
        failure = caller.refusal(f"{KV}/Put", **SHOP, key=b"k")
        assert failure.details() == "Insufficient permissions. Required capability: Write"
    with world.caller(world.tokens["main"]) as caller:
        for namespace in ("shop", "absent"):  # the same of what is there and what is not
            failure = caller.refusal(f"{KV}/Get", namespace=namespace, key=b"k")
            assert failure.code() is grpc.StatusCode.PERMISSION_DENIED
            assert failure.details() == f"Access denied to namespace '{namespace}' for tenant 'main'"
        failure = caller.refusal(f"{KV}/Get", namespace="n" * 1_000_000, key=b"k")
        assert len(failure.details() or "") < 300


def test_rate_limit_error_has_a_retry_delay() -> None:
    """SochDB builds the trailer and does not send it."""
    error = LimitExceeded("too many", retry_after_ms=250)
    assert errors.text(error) == "Rate limit exceeded. Retry after 250ms."
    assert ("retry-after-ms", "250") in errors.trailers(error)
    assert errors.status(error) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert errors.text(Forbidden("no")) == "no"


def test_unlocked_server_treats_callers_as_anonymous(tmp_path: Path) -> None:
    with Whole(tmp_path) as files, serving(files) as client:
        for metadata in ((), (("authorization", "Bearer whatever"),)):
            with calling(client, *metadata) as caller:
                assert caller.call(f"{KV}/Put", key=b"k", value=b"v").success
                assert caller.call(f"{KV}/Get", key=b"k").found


# --- whose is what -------------------------------------------------------------------------------------------------


def test_caller_can_neither_list_nor_cancel_subscriptions_of_others(world: World) -> None:
    """SochDB lets every caller cancel every subscription."""

    def ids(caller: Caller) -> list[str]:
        return [each.subscription_id for each in caller.call(f"{SUBSCRIPTIONS}/ListSubscriptions").subscriptions]

    def cancelled(caller: Caller) -> bool:
        return bool(caller.call(f"{SUBSCRIPTIONS}/CancelSubscription", subscription_id=id).success)

    with contextlib.ExitStack() as stack:
        callers = {name: stack.enter_context(world.caller(token)) for name, token in world.tokens.items()}
        wait_until_none_is_listed(callers["all"])
        reading = callers["viewer"].subscribe(**SHOP, tables=["b"])
        (id,) = ids(callers["viewer"])
        token = world.client.ok("security.token.create", name="second", role="viewer", scopes=["shop"])["token"]
        callers["second"] = stack.enter_context(world.caller(token))
        for name in ("main", "table", "pairs", "nowhere", "second"):
            assert ids(callers[name]) == [] and not cancelled(callers[name]), name
        assert ids(callers["shop"]) == ids(callers["all"]) == [id]  # owners see what is in their scopes
        assert cancelled(callers["viewer"]) and not cancelled(callers["viewer"])
        assert reading.rest() == []
        assert ids(callers["viewer"]) == []


# --- the end of a credential ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("end", ["revoked", "expired"])
@pytest.mark.parametrize("method", ["Subscribe", "WatchKey"])
@pytest.mark.parametrize("is_full", [False, True], ids=["reads", "does not read"])
def test_grpc_stream_whose_key_is_revoked_or_expires_fails_with_unauthenticated(
    world: World, end: str, method: str, is_full: bool
) -> None:
    more = {"expires_in_seconds": KEY_LIFETIME} if end == "expired" else {}
    made = world.client.ok("security.token.create", name="stream", scopes=["shop"], **more)
    with world.caller(made["token"]) as caller:
        reading = caller.stream(f"{SUBSCRIPTIONS}/{method}", **SHOP).opened()
        if is_full:  # the server waits for it to read
            for _ in range(12):
                world.files.run("INSERT INTO a(v) VALUES (hex(zeroblob(500000)))", db="shop")
        if end == "revoked":
            done = world.client.ok("security.token.revoke", id=made["id"])
            assert done["streams_ended"] == 1
        failure = reading.failure()
        assert failure.code() is grpc.StatusCode.UNAUTHENTICATED
        assert failure.details() == "Authentication token has expired."
        assert caller.refusal(f"{KV}/Get", **SHOP).code() is grpc.StatusCode.UNAUTHENTICATED


def test_watch_of_all_tables_needs_scopes_for_all(world: World) -> None:
    """A watcher of one key in every table needs scopes for all tables."""
    with world.caller(world.tokens["table"]) as caller:
        failure = caller.refusal(f"{SUBSCRIPTIONS}/WatchKey", **SHOP, key=encode_key((1,)))
        assert failure.code() is grpc.StatusCode.PERMISSION_DENIED
