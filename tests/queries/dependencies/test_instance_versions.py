"""Instance versions: a tag reported current is current, watched or not, also after trimming or a new generation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.capture.captured_database import Running, running

from headwater.queries.dependencies import instance_versions
from headwater.queries.dependencies.bound_dependencies import BoundDependencies, bind
from headwater.queries.dependencies.instance_versions import InstanceVersions

QUERIES = [
    ("SELECT v FROM t WHERE k = ?", [1]),
    ("SELECT v FROM t WHERE k = ?", [2]),
    ("SELECT k FROM t WHERE v > ? ORDER BY k", [5]),
    ("SELECT count(*) FROM t", []),
    ("SELECT t.k FROM t JOIN u ON u.k = t.v WHERE u.w = ?", [3]),
]


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path) as made:
        made.run("CREATE TABLE t(k INTEGER PRIMARY KEY, v INTEGER)")
        made.run("CREATE TABLE u(k INTEGER PRIMARY KEY, w INTEGER)")
        made.caught_up()
        yield made


def bound(one: Running, sql: str, args: list[int]) -> BoundDependencies:
    analysis = one.source.analyse(sql)
    named = dict(zip(analysis.parameters, args, strict=True))
    return bind(one.source, one.source.describe(), analysis, named)


def write(one: Running, chooser: random.Random) -> None:
    table = chooser.choice("tu")
    column = "v" if table == "t" else "w"
    key, value = chooser.randint(1, 4), chooser.randint(1, 8)
    one.run(
        chooser.choice(
            [
                f"INSERT OR REPLACE INTO {table} VALUES ({key}, {value})",
                f"UPDATE {table} SET {column} = {value} WHERE k = {key}",
                f"DELETE FROM {table} WHERE k = {key}",
            ]
        )
    )


@pytest.mark.parametrize("seed", range(6))
def test_current_tag_has_the_same_answer(one: Running, seed: int) -> None:
    """Check tags of every age, of instances that are watched, were watched, or never were."""
    chooser = random.Random(seed)
    found = InstanceVersions(one.source, one.log)
    bounds = [bound(one, sql, args) for sql, args in QUERIES]
    held: list[tuple[int, int, object]] = []
    stale = 0
    for _ in range(60):
        write(one, chooser)
        one.caught_up()
        reached = found.advance()
        assert reached == one.log.latest
        place = chooser.randrange(len(QUERIES))
        match chooser.randrange(4):
            case 0:
                found.watch(place, bounds[place])
            case 1:
                found.forget(place)
        sql, args = QUERIES[place]
        held.append((place, reached, one.source.read(sql, args).rows))
        for place, offset, rows in chooser.sample(held, min(8, len(held))):
            sql, args = QUERIES[place]
            if found.is_current(place, bounds[place], offset):
                assert one.source.read(sql, args).rows == rows, (seed, sql, args, offset)
            else:
                stale += 1
    assert stale > 20


def test_watched_instance_knows_its_last_relevant_change_before_the_watch(one: Running) -> None:
    found, mine = InstanceVersions(one.source, one.log), bound(one, *QUERIES[0])
    one.run("INSERT INTO t VALUES (1, 1)")
    one.caught_up()
    mattered = one.log.latest
    one.run("INSERT INTO t VALUES (2, 1)")
    one.caught_up()
    found.watch("mine", mine, last=0, since=0)
    assert found.last("mine") == (mattered, one.log.latest) and found.watching == 1
    one.run("UPDATE t SET v = 9 WHERE k = 2")
    one.caught_up()
    found.advance()
    assert found.last("mine") == (mattered, one.log.latest)
    assert found.is_current("mine", mine, mattered) and not found.is_current("mine", mine, mattered - 1)
    found.forget("mine")
    assert found.last("mine") is None and found.watching == 0


def test_tag_beyond_the_log_is_not_current(one: Running) -> None:
    found, mine = InstanceVersions(one.source, one.log), bound(one, *QUERIES[0])
    assert found.is_current("mine", mine, one.log.latest)
    assert not found.is_current("mine", mine, one.log.latest + 1)


def test_tag_older_than_the_scan_limit_is_not_current(one: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_versions, "MAX_SCAN", 3)
    mine = bound(one, "SELECT v FROM t WHERE k = ?", [1])
    before = one.log.latest
    for key in range(10, 20):
        one.run(f"INSERT INTO t VALUES ({key}, 1)")
    one.caught_up()
    found = InstanceVersions(one.source, one.log)  # as after a restart: it knows nothing of what was before
    assert not found.is_current("mine", mine, before)
    assert found.is_current("mine", mine, one.log.latest - 3), "a few changes are looked at one by one"


def test_new_generation_makes_all_tags_stale(one: Running) -> None:
    found, mine = InstanceVersions(one.source, one.log), bound(one, *QUERIES[0])
    found.watch("mine", mine)
    one.log.restart(first=one.log.latest + 2, reason="a test")
    found.advance()
    assert found.last("mine") is None
