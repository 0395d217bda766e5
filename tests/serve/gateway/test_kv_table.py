"""Keys and values in the table `kv`: put, get, delete, scan, and values that end."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.queries.open_databases import Files

from headwater.errors import Forbidden, InvalidRequest, NotFound, RequestTooLarge
from headwater.model.principal import EDITOR, VIEWER, Principal, Scope
from headwater.serve.api import Api
from headwater.serve.gateway.kv import MOST_BYTES, MOST_KEYS, SWEEP_MS, Entry, Kv
from headwater.serve.thread_bridge import Bridge

T = TypeVar("T")
EDIT = Principal("ed", EDITOR)


class Clock:
    """A clock in milliseconds that the test advances."""

    now = 1_000_000

    def __call__(self) -> int:
        return self.now


class Store:
    """A Kv over real databases, for tests without a running event loop."""

    def __init__(self, files: Files, bridge: Bridge) -> None:
        self.files, self.clock = files, Clock()
        self.kv = Kv(Api.over(files), bridge, self.clock)

    def run(self, call: Callable[[Kv], Awaitable[T]]) -> T:
        async def main() -> T:
            try:
                return await call(self.kv)
            finally:
                await asyncio.gather(*self.kv.sweeping.values())

        return asyncio.run(main())

    def put(self, key: bytes, value: bytes, ttl: int = 0, db: str = "main") -> int:
        return self.run(lambda kv: kv.put(EDIT, db, [Entry(key, value, ttl)]))

    def put_all(self, entries: list[Entry]) -> None:
        for start in range(0, len(entries), MOST_KEYS):
            some = entries[start : start + MOST_KEYS]
            self.run(lambda kv, some=some: kv.put(EDIT, "main", some))  # type: ignore[misc]

    def get(self, key: bytes, db: str = "main", who: Principal = EDIT) -> bytes | None:
        return self.run(lambda kv: kv.get(who, db, key))

    def delete(self, key: bytes) -> bool:
        return self.run(lambda kv: kv.delete(EDIT, "main", key))

    def scan(self, prefix: bytes = b"", limit: int = 0) -> list[tuple[bytes, bytes]]:
        async def all_of(kv: Kv) -> list[tuple[bytes, bytes]]:
            return [pair async for pair in kv.scan(EDIT, "", prefix, limit)]

        return self.run(all_of)


@contextmanager
def store_over(files: Files) -> Iterator[Store]:
    bridge = Bridge(threads=2)
    try:
        yield Store(files, bridge)
    finally:
        bridge.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Files(tmp_path) as files, store_over(files) as found:
        yield found


def test_reads_before_the_first_put_return_nothing_and_create_no_table(store: Store) -> None:
    assert store.get(b"a") is None
    assert store.delete(b"a") is False
    assert store.scan() == []
    assert store.run(lambda kv: kv.sweep(EDIT, "")) == 0
    assert "kv" not in store.files.get("main").describe()


def test_put_value_is_returned_until_it_is_deleted(store: Store) -> None:
    assert store.put(b"a", b"1") == 1
    assert store.get(b"a") == b"1"
    assert store.get(b"a", "default") == b"1", "an alias of main"
    store.put(b"a", b"\0\xff not text")
    assert store.get(b"a") == b"\0\xff not text"
    assert store.delete(b"a") is True
    assert store.delete(b"a") is False
    assert store.get(b"a") is None
    assert store.put(b"", b"") == 1
    assert store.get(b"") == b"", "an empty value is a value"


def test_kv_entries_are_stored_in_a_table_with_key_value_and_expiry_columns(store: Store) -> None:
    store.put(b"k", b"v", 5)
    table = store.files.get("main").describe()["kv"]
    assert table.key == ("key",)
    assert [(c.name, c.kind, c.nullable) for c in table.columns] == [
        ("key", "bytes", False),
        ("value", "bytes", False),
        ("expires_at_ms", "i64", True),
    ]
    assert store.files.rows("SELECT * FROM kv") == [(b"k", b"v", 1_005_000)]


def test_batch_is_one_transaction_and_the_last_entry_of_a_key_wins(store: Store) -> None:
    entries = [Entry(b"a", b"1"), Entry(b"b", b"2"), Entry(b"a", b"3")]
    assert store.run(lambda kv: kv.put(EDIT, "main", entries)) == 3
    assert store.run(lambda kv: kv.get_many(EDIT, "main", [b"b", b"x", b"a"])) == [b"2", None, b"3"]
    assert store.run(lambda kv: kv.put(EDIT, "main", [])) == 0
    with pytest.raises(InvalidRequest, match="ttl_seconds"):
        store.run(lambda kv: kv.put(EDIT, "main", [Entry(b"c", b"1"), Entry(b"d", b"1", -1)]))
    assert store.get(b"c") is None


def test_value_expires_at_its_millisecond(store: Store) -> None:
    store.put(b"short", b"1", 2)
    store.put(b"long", b"2")
    store.clock.now += 1_999
    assert store.get(b"short") == b"1"
    store.clock.now += 1
    assert store.get(b"short") is None
    assert store.scan() == [(b"long", b"2")]
    assert store.delete(b"short") is False, "it had ended"
    store.put(b"short", b"3", 2)
    store.put(b"short", b"4")
    store.clock.now += 5_000
    assert store.get(b"short") == b"4", "put for good, it does not end"


def test_expired_value_is_swept_by_a_later_put(store: Store) -> None:
    for place in range(5):
        store.put(b"%d" % place, b"", 1)
    store.clock.now += SWEEP_MS
    store.put(b"new", b"")
    assert store.files.rows("SELECT key FROM kv") == [(b"new",)]


def test_sweep_deletes_more_than_one_batch(store: Store) -> None:
    entries = [Entry(b"%d" % place, b"", 1) for place in range(2_500)]
    store.put_all(entries)
    store.clock.now += 1_000
    assert store.run(lambda kv: kv.sweep(EDIT, "main")) == 2_500


def test_kv_put_succeeds_when_the_expiry_sweep_fails_and_a_later_put_sweeps(store: Store) -> None:
    store.put(b"old", b"", 1)
    store.files.run("CREATE TRIGGER stays BEFORE DELETE ON kv BEGIN SELECT RAISE(ABORT, 'it stays'); END")
    store.clock.now += SWEEP_MS
    assert store.put(b"new", b"1") == 1
    assert store.files.rows("SELECT key FROM kv ORDER BY key") == [(b"new",), (b"old",)]
    store.files.run("DROP TRIGGER stays")
    store.clock.now += SWEEP_MS
    store.put(b"new", b"2")
    assert store.files.rows("SELECT key FROM kv") == [(b"new",)], "a later one succeeds"


@pytest.mark.slow
def test_read_of_many_keys_is_limited(store: Store) -> None:
    store.put(b"k", bytes(1 << 20))
    most = MOST_BYTES // ((1 << 20) + 1)
    assert store.run(lambda kv: kv.get_many(EDIT, "main", [b"k"] * most)) == [bytes(1 << 20)] * most
    with pytest.raises(RequestTooLarge, match="larger than") as found:
        store.run(lambda kv: kv.get_many(EDIT, "main", [b"k"] * (most + 1)))
    assert "fewer" in found.value.hint
    store.put(b"large", bytes(MOST_BYTES + 1))
    assert len(store.get(b"large") or b"") == MOST_BYTES + 1, "one alone is given"
    assert store.run(lambda kv: kv.get_many(EDIT, "main", [b"x"] * MOST_KEYS)) == [None] * MOST_KEYS
    with pytest.raises(InvalidRequest, match="keys are requested") as refused:
        store.run(lambda kv: kv.get_many(EDIT, "main", [b"x"] * (MOST_KEYS + 1)))
    assert "fewer" in refused.value.hint


def test_kv_scan_returns_all_keys_with_the_prefix_in_byte_order_up_to_the_limit(store: Store, fresh_seed: str) -> None:
    dice = random.Random(fresh_seed)
    keys = {bytes(dice.choices(b"\0\x01a\xfe\xff", k=dice.randrange(7))) for _ in range(3_000)}
    store.put_all([Entry(key, key[::-1]) for key in keys])
    for prefix in (b"", b"\0", b"a", b"a\0", b"a\xff", b"\xff", b"\xff\xff", b"\0\xff", b"zz"):
        wanted = [(key, key[::-1]) for key in sorted(keys) if key.startswith(prefix)]
        assert store.scan(prefix) == wanted, prefix
        assert store.scan(prefix, 3) == wanted[:3], prefix


def test_kv_calls_check_roles_scopes_and_namespaces(store: Store) -> None:
    store.files.create("other")
    store.put(b"a", b"1")
    assert store.get(b"a", "other") is None, "each namespace has keys of its own"
    with pytest.raises(NotFound):
        store.get(b"a", "nowhere")
    viewer = Principal("v", VIEWER)
    assert store.get(b"a", who=viewer) == b"1"
    for call in (
        lambda kv: kv.put(viewer, "main", [Entry(b"a", b"2")]),
        lambda kv: kv.delete(viewer, "main", b"a"),
    ):
        with pytest.raises(Forbidden):
            store.run(call)
    held = Principal("h", EDITOR, scopes=(Scope("main", ("kv",)),))
    assert store.get(b"a", who=held) == b"1"
    elsewhere = Principal("e", EDITOR, scopes=(Scope("other", ("kv",)),))
    for db in ("main", "nowhere"):  # what is there and what is not look alike
        with pytest.raises(Forbidden):
            store.get(b"a", db, elsewhere)
    assert store.run(lambda kv: kv.put(elsewhere, "other", [Entry(b"x", b"y")])) == 1, "the table is made for it"


def test_table_kv_of_another_shape_is_refused(store: Store) -> None:
    store.files.run("CREATE TABLE kv (key TEXT PRIMARY KEY, value TEXT)")
    store.files.run("INSERT INTO kv VALUES ('a', 'b')")
    calls: list[Callable[[], Any]] = [
        lambda: store.put(b"a", b"1"),
        lambda: store.get(b"a"),
        lambda: store.delete(b"a"),
        store.scan,
    ]
    for call in calls:
        with pytest.raises(InvalidRequest, match="key-value table"):
            call()
    assert store.files.rows("SELECT * FROM kv") == [("a", "b")]
