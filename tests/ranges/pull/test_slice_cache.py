"""The slice cache returns what was stored, detects damage, stays within its limit and never fails a reader."""

import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from headwater.model.table import Column, Table
from headwater.ranges.pull.slice_cache import SUFFIX, Cache, SliceName, Stop

TABLE = Table("t", (Column("id", "i64"),), ("id",))


def name(after: int, generation: str = "g1", table: Table = TABLE, db: str = "main") -> SliceName:
    return SliceName(db, generation, table, after)


def keep(cache: Cache, which: SliceName, body: bytes, stops: list[Stop] | None = None) -> None:
    writing = cache.begin(which)
    assert writing is not None
    for place in range(0, len(body), 7):
        assert writing.add(body[place : place + 7], 1)
    writing.done(stops or [])


def body(cache: Cache, which: SliceName) -> bytes | None:
    found = cache.get(which)
    if found is None:
        return None
    try:
        return found.read(0, found.length)
    finally:
        found.close()


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path, 10_000)


def test_cached_slice_is_read_back(cache: Cache) -> None:
    assert cache.get(name(0)) is None
    keep(cache, name(0), b"some bytes of Arrow", [(5, "truncated")])
    found = cache.get(name(0))
    assert found is not None
    assert (found.read(0, found.length), found.rows, found.stops, found.length) == (
        b"some bytes of Arrow",
        3,
        [(5, "truncated")],
        19,
    )
    found.close()
    assert (cache.hits, cache.misses) == (1, 1)
    assert cache.bytes == sum(path.stat().st_size for path in files(cache._folder))


def test_slices_of_another_table_shape_or_database_are_cached_separately(cache: Cache) -> None:
    other = Table("t", (Column("id", "i64"), Column("new")), ("id",), 2)
    for number, which in enumerate([name(0), name(16384), name(0, table=other), name(0, db="b")]):
        keep(cache, which, b"%d" % number)
    assert [body(cache, name(0)), body(cache, name(0, table=other)), body(cache, name(0, db="b"))] == [b"0", b"2", b"3"]


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "empty", "mark", "notes"])
def test_damaged_file_is_detected_and_deleted(tmp_path: Path, damage: str) -> None:
    keep(Cache(tmp_path, 10_000), name(0), b"x" * 100, [(1, "truncated")])
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[60] ^= 1
    elif damage == "mark":
        data[0] ^= 1
    elif damage == "notes":
        data[-1] ^= 1
    path.write_bytes({"cut": data[:-1], "grow": data + b"!", "empty": b""}.get(damage, data))
    cache = Cache(tmp_path, 10_000)
    assert cache.get(name(0)) is None
    assert files(tmp_path) == [] and cache.bytes == 0
    keep(cache, name(0), b"again")
    assert body(cache, name(0)) == b"again"


def test_damage_after_the_first_use_is_detected(cache: Cache) -> None:
    keep(cache, name(0), b"x" * 100)
    assert body(cache, name(0)) == b"x" * 100
    (path,) = files(cache._folder)
    with path.open("r+b") as file:
        file.seek(50)
        file.write(b"y")
    os.utime(path, ns=(1, 1))  # a write is known by its time, which may be that of the last one on a coarse clock
    assert cache.get(name(0)) is None


def test_least_recently_used_slice_is_evicted_first(tmp_path: Path) -> None:
    ticks = count(time.time_ns() + 10**12, 10**9)  # later than any write: else a file system may set it by itself
    cache = Cache(tmp_path, 450, clock=lambda: next(ticks))
    for after in (0, 1, 2):
        keep(cache, name(after), b"x" * 100)
    assert body(cache, name(0)) is not None
    keep(cache, name(3), b"x" * 100)
    assert [body(cache, name(after)) is not None for after in (0, 1, 2, 3)] == [True, False, True, True]
    assert cache.bytes == sum(path.stat().st_size for path in files(tmp_path)) <= 450
    assert body(cache, name(0)) is not None
    again = Cache(tmp_path, 300)  # also after a restart
    assert [body(again, name(after)) is not None for after in (0, 2, 3)] == [True, False, True]


def test_slice_over_the_cache_limit_is_rejected_and_leaves_no_file(cache: Cache) -> None:
    writing = cache.begin(name(0))
    assert writing is not None
    assert not writing.add(b"x" * 2_501, 1)
    writing.drop()
    assert files(cache._folder) == []


def test_slice_cache_of_zero_bytes_accepts_no_slice(tmp_path: Path) -> None:
    assert Cache(tmp_path, 0).begin(name(0)) is None


def test_slices_of_older_generations_are_deleted(cache: Cache) -> None:
    keep(cache, name(0, "g1"), b"old")
    keep(cache, name(0, "g1", db="other"), b"of another database")
    keep(cache, name(0, "g2"), b"new")
    assert body(cache, name(0, "g1")) is None
    assert (body(cache, name(0, "g2")), body(cache, name(0, "g1", db="other"))) == (b"new", b"of another database")
    assert cache.bytes == sum(path.stat().st_size for path in files(cache._folder))


def test_unfinished_files_of_a_killed_process_are_deleted(tmp_path: Path) -> None:
    first = Cache(tmp_path, 10_000)
    keep(first, name(0), b"whole")
    writing = first.begin(name(1))
    assert writing is not None
    writing.add(b"half", 1)
    cache = Cache(tmp_path, 10_000)
    assert [path.suffix for path in files(tmp_path)] == [SUFFIX]
    assert body(cache, name(0)) == b"whole"
    writing.drop()


def test_open_slice_is_readable_after_eviction(cache: Cache) -> None:
    keep(cache, name(0), b"x" * 100)
    found = cache.get(name(0))
    assert found is not None
    keep(cache, name(0, "g2"), b"new")
    assert found.read(0, found.length) == b"x" * 100
    found.close()


@pytest.fixture
def no_space(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def full(*args: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headwater.ranges.pull.slice_cache.tempfile.mkstemp", full)
    yield


def test_full_disk_disables_the_cache_without_errors(no_space: None, cache: Cache) -> None:
    assert cache.begin(name(0)) is None
    assert cache.get(name(0)) is None
