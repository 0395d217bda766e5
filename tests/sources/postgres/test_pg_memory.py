"""Memory kept for the statements and arguments of callers is small, however long they are."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.sources.postgres.pg_database import Rig
from tests.sources.postgres.pg_server import Server
from tests.sources.postgres.pg_source import PgRig
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.errors import AnswerTooLarge, HeadwaterError, InvalidRequest
from headwater.model.principal import OWNER
from headwater.model.table import Column, Table
from headwater.model.work.answer_limits import MEMORY
from headwater.sources.postgres.errors import CANCELED, state_of
from headwater.sources.postgres.protocol_session import Link, Pool
from headwater.sources.postgres.query.analysis import analysis
from headwater.sources.postgres.schema import column_probe
from headwater.sources.postgres.schema.column_probe import MAX_KEPT
from headwater.sources.write import Session


@pytest.fixture(scope="module")
def own(pg: Server) -> Iterator[PgRig]:
    made = PgRig(pg, f"memory_{os.getpid()}", "CREATE TABLE t(id int PRIMARY KEY, a text)")
    yield made
    made.close()


# --- values as columns hold them ----------------------------------------------------------------------------


def table(declared: str) -> Table:
    return Table("t", (Column("c", "text", declared=declared),), ("c",))


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the sizes of PostgreSQL's answers."""
    sizes: list[int] = []
    run = Link.run

    def counted(link: Link, *args: Any, **more: Any) -> Any:
        answer = run(link, *args, **more)
        sizes.append(sum(len(cell or b"") for row in answer.rows for cell in row))
        return answer

    monkeypatch.setattr(Link, "run", counted)
    return sizes


def test_large_values_are_not_kept(pg_rig: Callable[..., Rig]) -> None:
    rig = pg_rig()
    for size in (10, MAX_KEPT, MAX_KEPT + 1, 1_000_000):
        assert rig.columns.stored(table("text"), ["c"], ("x" * size,)) == ("x" * size,)
    assert len(rig.columns._held) == 2
    rig.columns.stored(table(f"character({MAX_KEPT + 1})"), ["c"], ("x",))
    assert len(rig.columns._held) == 2, "a short value that the column makes long"


@pytest.mark.parametrize("declared", ["text", "character varying(2000000)", "character varying"])
def test_large_value_is_received_once(pg_rig: Callable[..., Rig], received: list[int], declared: str) -> None:
    rig = pg_rig()
    given = "x" * 1_000_000
    assert rig.columns.stored(table(declared), ["c"], (given,)) == (given,)
    assert sum(received) < 1_001_000


def test_received_value_is_counted_in_the_memory_of_answers(
    pg_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = pg_rig()
    monkeypatch.setattr(MEMORY, "max_bytes", 1_000_000)
    with pytest.raises(AnswerTooLarge):
        rig.columns.stored(table("text"), ["c"], ("x" * 20_000_000,))


@pytest.mark.parametrize(
    ("declared", "given", "held"),
    [
        ("character varying(3)", "abc", "abc"),
        ("character varying(3)", "abc   ", "abc"),
        ("character varying(3)", "abcd", None),
        ("character varying(3)", "äöü", "äöü"),
        ("character varying(3)", "ab\t\t", None),
        ("character(3)", "a", "a  "),
        ("character(3)", "abc  ", "abc"),
        ("character(3)", "abcd", None),
        ("bit(3)", "101", "101"),
        ("bit(3)", "1011", None),
        ("bit(3)", "10", None),
        ("bit varying(3)", "10", "10"),
        ("bit varying(3)", "1011", None),
        ("character varying(2)[]", "{abc}", "{ab}"),
        ("numeric(4,2)", "1.005", None),
    ],
)
def test_value_too_long_for_its_column_is_refused(
    pg_rig: Callable[..., Rig], declared: str, given: str, held: str | None
) -> None:
    rig = pg_rig()
    if declared.startswith("numeric"):
        assert str(rig.columns.stored(table(declared), ["c"], (given,))[0]) == "1.01"
    elif held is None:
        with pytest.raises(InvalidRequest, match="too long for type"):
            rig.columns.stored(table(declared), ["c"], (given,))
    else:
        assert str(rig.columns.stored(table(declared), ["c"], (given,))[0]) == held


def test_slow_conversion_of_value_ends_at_the_time_limit(pg_rig: Callable[..., Rig]) -> None:
    rig = pg_rig(
        "CREATE FUNCTION slow(text) RETURNS bool LANGUAGE sql AS 'SELECT pg_sleep(60) IS NOT NULL'",
        "CREATE DOMAIN slowly AS text CHECK (slow(VALUE))",
    )
    asked = column_probe.Columns(rig.pool, seconds=0.3)
    with pytest.raises(HeadwaterError) as found:
        asked.stored(table("slowly"), ["c"], ("x",))
    assert state_of(found.value) == CANCELED


# --- statements ---------------------------------------------------------------------------------------------


def test_long_statements_are_forgotten_before_their_number_is_reached(
    own: PgRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own.source._analyses._known, "_max_weight", 2_000_000)
    for number in range(12):
        found = own.source.analyse(f"SELECT {number} AS n --{'x' * 90_000}")
    known = own.source._analyses._known
    assert known.weight <= 2_000_000 and len(known) < 12
    assert own.source.answer(found, {}) is not None


def test_astral_text_counts_four_bytes_for_each_character(own: PgRig) -> None:
    known = own.source._analyses._known
    sizes = []
    for sign in ("x", "\U0001f600"):
        known.clear()
        own.source.analyse(f"SELECT 1 --{sign * 10_000}")
        sizes.append(known.weight)
    assert sizes[1] > 3 * sizes[0] and sizes[0] >= analysis.TEXT_FACTOR * 10_000


def test_names_of_many_columns_are_counted_in_the_memory_of_an_analysis(own: PgRig) -> None:
    known = own.source._analyses._known
    known.clear()
    own.source.analyse("SELECT * FROM (SELECT * FROM t, (SELECT 1 AS one) u) v")
    few = known.weight
    known.clear()
    own.source.analyse("SELECT * FROM json_to_recordset('[]') AS r(" + ",".join(f"a{n} int" for n in range(500)) + ")")
    assert known.weight > few + 500 * analysis.NAME


def test_refused_statement_is_not_remembered(own: PgRig) -> None:
    known = own.source._analyses._known
    known.clear()
    with pytest.raises(HeadwaterError):
        own.source.analyse("SELECT pg_terminate_backend(1)")
    assert len(known) == 0
    own.source.analyse("SELECT 1 AS one")
    assert len(known) == 1


def test_texts_of_checked_statements_are_not_kept(own: PgRig, monkeypatch: pytest.MonkeyPatch) -> None:
    callers = own.source._callers
    texts = [f"SELECT {n}, $1 --pg_cancel_backend {'x' * 50_000}" for n in range(3)]
    for text in texts:
        callers.check(OWNER, text, (1,))
    assert {len(key) for key in callers._checked._known} == {32} and len(callers._checked) == 3
    callers.check(OWNER, texts[0], ("a",))  # of another type
    callers.check(OWNER, texts[0] + " ", (1,))
    assert len(callers._checked) == 5
    monkeypatch.setattr(Pool, "probe", lambda *_: pytest.fail("it was checked before"))
    for text in texts:
        callers.check(OWNER, text, (2,))


# --- answers to writes ---------------------------------------------------------------------------------------


class Answer:
    """A value whose lifetime a test can observe."""


def test_idle_writers_keep_no_answer(own: PgRig) -> None:
    def work(session: Session) -> Answer:
        session.execute("SELECT 1")
        return Answer()

    kept = weakref.ref(own.source.write(work).result(PATIENCE).value)
    wait_until(lambda: kept() is None, "the answer was freed")
