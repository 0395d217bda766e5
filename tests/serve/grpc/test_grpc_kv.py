"""sochdb.v1.KvService over a real channel. What the table does is tested in test_kv_table."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from tests.queries.open_databases import Whole
from tests.serve.grpc_calls import KV, Caller, calling
from tests.serve.server_fixture import NoDatabases, serving
from tests.suite.deadlines import PATIENCE

from headwater.errors import Forbidden
from headwater.model.principal import VIEWER, Principal
from headwater.serve.api import Api
from headwater.serve.gateway.kv import Kv
from headwater.serve.grpc import calls
from headwater.serve.grpc.kv import KvService
from headwater.serve.grpc.messages import LARGE, MAX_FIELDS, decode
from headwater.serve.thread_bridge import Bridge

pytestmark = pytest.mark.slow

NO_BRIDGE = cast("Bridge", None)  # for what needs no thread


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Whole]:
    with Whole(tmp_path / "data") as made:
        yield made


@pytest.fixture
def caller(files: Whole) -> Iterator[Caller]:
    with serving(files) as client, calling(client) as made:
        yield made


def get(caller: Caller, key: bytes, **more: Any) -> bytes | None:
    answer = caller.call(f"{KV}/Get", key=key, **more)
    assert not answer.error and (answer.found or not answer.value)
    return answer.value if answer.found else None


def put(caller: Caller, key: bytes, value: bytes, **more: Any) -> None:
    answer = caller.call(f"{KV}/Put", key=key, value=value, **more)
    assert answer.success and not answer.error


def test_put_value_is_returned_until_a_delete_over_grpc(caller: Caller) -> None:
    assert get(caller, b"a") is None
    put(caller, b"a", b"one")
    put(caller, b"b", b"")
    assert (get(caller, b"a"), get(caller, b"b"), get(caller, b"c")) == (b"one", b"", None)
    put(caller, b"a", b"two")
    assert get(caller, b"a") == b"two"
    assert [caller.call(f"{KV}/Delete", key=b"a").success for _ in range(2)] == [True, False]
    assert get(caller, b"a") is None


@pytest.mark.parametrize("key", [b"", b"\0", bytes(range(256)), b"\xff" * 1000, "ü".encode()])
def test_keys_and_values_of_any_bytes_are_stored(caller: Caller, key: bytes) -> None:
    put(caller, key, key[::-1])
    assert get(caller, key) == key[::-1]
    assert [(pair.key, pair.value) for pair in caller.stream(f"{KV}/Scan").rest()] == [(key, key[::-1])]


def test_scan_returns_keys_in_order_by_prefix_up_to_a_limit(caller: Caller) -> None:
    entries = [{"key": b"%b:%03d" % (kind, number), "value": b"x"} for kind in (b"b", b"a") for number in range(300)]
    assert caller.call(f"{KV}/BatchPut", entries=entries).success_count == 600
    everything = [pair.key for pair in caller.stream(f"{KV}/Scan").rest()]
    assert everything == sorted(entry["key"] for entry in entries)
    assert [pair.key for pair in caller.stream(f"{KV}/Scan", prefix=b"b:29").rest()] == everything[-10:]
    assert [pair.key for pair in caller.stream(f"{KV}/Scan", limit=3).rest()] == everything[:3]
    assert caller.stream(f"{KV}/Scan", prefix=b"c").rest() == []


def test_batch_put_and_batch_get_return_counts_and_values_in_request_order(caller: Caller) -> None:
    assert caller.call(f"{KV}/BatchPut").success_count == 0
    found = caller.call(f"{KV}/BatchPut", entries=[{"key": b"a", "value": b"1"}, {"key": b"b", "value": b"2"}])
    assert (found.success_count, found.error) == (2, "")
    entries = caller.call(f"{KV}/BatchGet", keys=[b"b", b"x", b"a", b"b"]).entries
    assert [(each.key, each.value, each.found) for each in entries] == [
        (b"b", b"2", True),
        (b"x", b"", False),
        (b"a", b"1", True),
        (b"b", b"2", True),
    ]


def test_batch_get_answer_is_limited(caller: Caller) -> None:
    put(caller, b"k", bytes(1 << 20))
    failure = caller.refusal(f"{KV}/BatchGet", keys=[b"k"] * 60)
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "values are larger" in failure.details()
    failure = caller.refusal(f"{KV}/BatchGet", keys=[b"x"] * 1001)
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "fewer" in dict(failure.trailing_metadata())["headwater-hint"]
    assert len(caller.call(f"{KV}/BatchGet", keys=[b"x"] * 1000).entries) == 1000


def test_batch_of_more_than_1000_entries_is_refused(caller: Caller) -> None:
    entries = [{"key": b"%d" % number} for number in range(1001)]
    failure = caller.refusal(f"{KV}/BatchPut", entries=entries)
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "fewer" in dict(failure.trailing_metadata())["headwater-hint"]
    assert caller.call(f"{KV}/BatchPut", entries=entries[:1000]).success_count == 1000


class Untouched(Sequence[Any]):
    """Entries that must not be looked at."""

    def __len__(self) -> int:
        raise AssertionError("the entries were counted")

    def __getitem__(self, place: Any) -> Any:
        raise AssertionError("an entry was read")


def test_batch_of_a_viewer_is_refused_before_its_entries_are_read() -> None:
    made: Any = SimpleNamespace(who=Principal("ada", VIEWER))
    asked = SimpleNamespace(namespace="main", entries=Untouched())
    put: Any = KvService(Kv(Api.over(NoDatabases()), NO_BRIDGE), NO_BRIDGE).methods()["BatchPut"]
    with pytest.raises(Forbidden):
        asyncio.run(put(made, asked))


def test_message_with_too_many_fields_is_refused_undecoded(caller: Caller) -> None:
    call = caller.channel.unary_unary(f"/{KV}/BatchPut")
    with pytest.raises(grpc.RpcError) as failure:
        call(b"\x12\x00" * (MAX_FIELDS + 1), timeout=PATIENCE)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "fields" in failure.value.details()


def test_large_message_is_decoded_in_a_thread(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def noted(name: str, data: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return decode(name, data)

    monkeypatch.setattr(calls, "decode", noted)
    put(caller, b"a", bytes(LARGE))
    put(caller, b"a", b"")
    assert threads[0].startswith("headwater-read") and not threads[1].startswith("headwater-read")


def test_batch_put_is_atomic(caller: Caller) -> None:
    entries = [{"key": b"a", "value": b"1"}, {"key": b"b", "value": b"2", "ttl_seconds": 2**63}]
    assert caller.refusal(f"{KV}/BatchPut", entries=entries).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert get(caller, b"a") is None


def test_namespace_of_a_kv_call_is_a_database(files: Whole, caller: Caller) -> None:
    files.create("other")
    put(caller, b"a", b"main")
    put(caller, b"a", b"other", namespace="other")
    assert [get(caller, b"a", namespace=name) for name in ("", "default", "main")] == [b"main"] * 3
    assert get(caller, b"a", namespace="other") == b"other"
    for method in ("Get", "Put", "Delete", "Scan", "BatchGet", "BatchPut"):
        assert caller.refusal(f"{KV}/{method}", namespace="absent").code() is grpc.StatusCode.NOT_FOUND, method


def test_user_table_named_kv_is_not_used(files: Whole, caller: Caller) -> None:
    files.run("CREATE TABLE kv(id INTEGER PRIMARY KEY, note TEXT)")
    failure = caller.refusal(f"{KV}/Put", key=b"a", value=b"1")
    assert (
        failure.code() is grpc.StatusCode.INVALID_ARGUMENT
        and "Rename" in dict(failure.trailing_metadata())["headwater-hint"]
    )
    assert files.rows("SELECT * FROM kv") == []


def test_concurrent_puts_all_succeed(caller: Caller) -> None:
    def write(name: int) -> None:
        for number in range(25):
            put(caller, b"%d.%d" % (name, number), b"x")

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caller.stream(f"{KV}/Scan").rest()) == 100
