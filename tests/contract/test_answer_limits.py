"""Limits on the answers of callers' statements, on every source that takes SQL."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.contract.test_source import Driver, Postgres, Sqlite
from tests.suite.deadlines import PATIENCE

from headwater.errors import AnswerTooLarge, Busy
from headwater.model.work.answer_limits import MAX_BYTES, MAX_MEMORY, MEMORY
from headwater.sources.postgres.protocol_session import Link
from headwater.sources.sqlite.connection import HEAP

MIB = 1 << 20
ROWS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < {})"
FOUR = "SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4"
STATEMENTS: dict[type[Driver], dict[str, str]] = {
    Sqlite: {
        "one value": "SELECT zeroblob(900000000)",
        "a wide row": "SELECT " + ", ".join(["randomblob(30000000)"] * 4),
        "a wide row of zeros": "SELECT " + ", ".join(["zeroblob(60000000)"] * 10),
        "a wider row than memory": "SELECT " + ", ".join(["randomblob(60000000)"] * 20),
        "two evaluations": "SELECT zeroblob(CASE WHEN random() % 2 THEN 60000000 ELSE 1 END) FROM "
        f"({FOUR}), ({FOUR}), ({FOUR})",
        "large rows": f"{ROWS.format(1000)} SELECT zeroblob(1000000) FROM c",
        "small rows": f"{ROWS.format(100000)} SELECT {', '.join(['x'] * 60)} FROM c",
        "a large group": f"{ROWS.format(1000)} SELECT group_concat(hex(zeroblob(1000000))) FROM c",
    },
    Postgres: {
        "one value": "SELECT repeat('x', 100000000)",
        "a wide row": "SELECT " + ", ".join(["repeat('x', 30000000)"] * 4),
        "large rows": "SELECT repeat('x', 1000000) FROM generate_series(1, 1000)",
        "small rows": f"SELECT {', '.join(['x'] * 60)} FROM generate_series(1, 100000) x",
    },
}
CASES = [
    pytest.param(made, sql, id=f"{made.__name__}-{name}")
    for made, all in STATEMENTS.items()
    for name, sql in all.items()
]
SOURCES = [Sqlite, Postgres]


@pytest.fixture
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Driver]:
    made: Driver = request.param(tmp_path)
    assert made.proof() == ""
    yield made
    made.close()


@pytest.mark.parametrize(("driver", "sql"), CASES, indirect=["driver"])
def test_answer_over_the_limit_is_refused_and_the_next_answer_is_returned(driver: Driver, sql: str) -> None:
    with pytest.raises(AnswerTooLarge) as refused:
        driver.source.read(sql)
    assert refused.value.hint
    assert driver.source.read("SELECT 1 + 1").rows == ((2,),)
    assert MEMORY.used == 0


@pytest.mark.parametrize("driver", [Postgres], indirect=True)
def test_answer_over_the_limit_is_not_retried(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        driver.source.read("SELECT 1")  # connections wait in the pool
    given_up: list[Link] = []
    real = Link._give_up
    monkeypatch.setattr(Link, "_give_up", lambda link: (given_up.append(link), real(link)))
    with pytest.raises(AnswerTooLarge):
        driver.source.read(STATEMENTS[Postgres]["large rows"])
    assert len(given_up) == 1


@pytest.mark.parametrize("driver", SOURCES, indirect=True)
def test_prepared_query_over_the_answer_limit_is_refused(driver: Driver) -> None:
    sql = STATEMENTS[type(driver)]["large rows"]
    with pytest.raises(AnswerTooLarge):
        driver.source.answer(driver.source.analyse(sql), {})
    assert MEMORY.used == 0


@pytest.mark.parametrize("driver", SOURCES, indirect=True)
def test_large_text_within_the_limit_is_returned_whole(driver: Driver) -> None:
    if isinstance(driver, Sqlite):
        text, place = 'aé\0😀"\n' * (3 * MIB), "?"
    else:  # whose text has no NUL
        text, place = 'aé😀"\n' * (3 * MIB), "$1::text"
    (row,) = driver.source.read(f"SELECT 7, {place}, NULL", [text]).rows
    assert row == (7, text, None)


@pytest.mark.parametrize("driver", SOURCES, indirect=True)
def test_write_whose_answer_is_too_large_changes_nothing(driver: Driver) -> None:
    long = "hex(zeroblob(40000000))" if isinstance(driver, Sqlite) else "repeat('x', 80000000)"

    def work(session: Any) -> None:
        session.execute(f"INSERT INTO t SELECT 1, 'a' RETURNING {long}")

    with pytest.raises(AnswerTooLarge):
        driver.source.write(work).result(PATIENCE)
    assert driver.source.read("SELECT count(*) FROM t").rows == ((0,),)


@pytest.fixture
def small_memory() -> Iterator[None]:
    """Lower the limits to an eighth: PostgreSQL takes seconds to make half a gigabyte."""
    MEMORY.configure(max_bytes=MAX_BYTES // 8, max_memory=MAX_MEMORY // 8)
    yield
    MEMORY.configure()


@pytest.mark.parametrize("driver", [Postgres], indirect=True)
@pytest.mark.usefixtures("small_memory")
def test_answer_without_free_memory_is_busy_on_postgresql(driver: Driver) -> None:
    assert_busy_without_free_memory(driver, "SELECT repeat('x', 2500000)")


@pytest.mark.parametrize("driver", [Sqlite], indirect=True)
def test_answer_without_free_memory_is_busy_until_another_answer_ends(driver: Driver) -> None:
    assert_busy_without_free_memory(driver, "SELECT zeroblob(20000000)")


@pytest.mark.parametrize(
    ("driver", "sql"),
    [(Sqlite, "SELECT printf('%.*c', 7000000, 'x') || {}"), (Postgres, "SELECT repeat('x', 7000000) || {}")],
    indirect=["driver"],
)
@pytest.mark.usefixtures("small_memory")
def test_text_with_a_wide_character_is_busy_without_memory_for_all_its_characters(driver: Driver, sql: str) -> None:
    """Python takes 4 bytes for each character of a text with one above U+FFFF: here 28 MB of 64 MiB."""
    with contextlib.suppress(Busy):
        held = [driver.source.read(sql.format("'😀'")) for _ in range(3)]
        pytest.fail(f"{len(held)} answers of 28 MB each")
    assert MEMORY.used == 0
    narrow = [driver.source.read(sql.format("'x'")) for _ in range(3)]
    assert len(narrow[2].rows) == 1
    (text,) = driver.source.read(sql.format("'😀'")).rows[0]
    assert text == "x" * 7_000_000 + "😀"


def assert_busy_without_free_memory(driver: Driver, sql: str) -> None:
    held = [driver.source.read(sql) for _ in range(20)]
    assert MEMORY.used <= MEMORY.max_memory
    more: list[Any] = []
    with pytest.raises(Busy):
        while len(more) < 20:
            more.append(driver.source.read(sql))
    assert driver.source.read("SELECT 1").rows == ((1,),)  # a small one is answered
    more.clear()
    held.clear()
    assert MEMORY.used == 0
    assert len(driver.source.read(sql).rows) == 1


@pytest.mark.parametrize("driver", [Sqlite], indirect=True)
def test_concurrent_statements_stay_within_the_heap_limit(driver: Driver) -> None:
    sql = "SELECT " + " || ".join(["randomblob(50000000)"] * 2)
    apsw.memory_high_water(True)
    threads = [threading.Thread(target=_read, args=(driver, sql)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert MAX_BYTES < apsw.memory_high_water() <= HEAP + (128 << 20)
    assert driver.source.read("SELECT 1").rows == ((1,),)


def _read(driver: Driver, sql: str) -> None:
    with pytest.raises((AnswerTooLarge, Busy)):
        driver.source.read(sql)
