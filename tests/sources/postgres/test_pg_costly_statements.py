"""Costly statements of callers: those that PostgreSQL does not end in time, and those with large errors or trees."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.sources.postgres.pg_database import Rig
from tests.sources.postgres.pg_server import Server
from tests.sources.postgres.pg_source import shared_server
from tests.sources.postgres.setup.test_pg_logins import Site
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.errors import Busy, HeadwaterError, InvalidRequest, SourceError, TxExpired
from headwater.model.work.work_context import CALLER
from headwater.sources.postgres import protocol_session as links
from headwater.sources.postgres.abandoned_statements import MOST, AbandonedStatements
from headwater.sources.postgres.connection import Server as Address
from headwater.sources.postgres.errors import CANCELED, state_of
from headwater.sources.postgres.protocol_session import WORDS, Link, Pool
from headwater.sources.postgres.query.analysis.parameters import marked
from headwater.sources.postgres.query.analysis.parse_tree_source import MAX_TREE
from headwater.sources.postgres.query.statement_rules import _CALLED, _CALLED_QUOTED, MAX_TEXT, check_allowed, placed
from headwater.sources.postgres.write import interactive_transaction as transactions

pytestmark = pytest.mark.slow

READER, WRITER = f"costly_reader_{os.getpid()}", f"costly_writer_{os.getpid()}"
DEAF = "SELECT strpos(repeat('a', 240000), 'b' || repeat('a', 120000))"  # about ten seconds, without interrupts
LARGE = "repeat('x', 50000000)::int"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten how long callers wait beyond PostgreSQL's own limits."""
    monkeypatch.setattr(links, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(transactions, "CANCEL_SECONDS", 0.3)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Yield a server with logins for callers."""
    folder = tmp_path_factory.mktemp("costly")
    made = Site(shared_server(), f"costly_{os.getpid()}", folder, reader=READER, writer=WRITER)
    yield made
    made.db.execute(f"DROP OWNED BY {READER}, {WRITER}".encode())
    made.close()
    with shared_server().connect() as admin:
        admin.execute(f"DROP ROLE {READER}, {WRITER}".encode())


def abandon(read: Callable[[], Any], abandoned: AbandonedStatements) -> HeadwaterError:
    """Repeat a statement until it is abandoned and return its error: PostgreSQL may end some in time, before they call
    the function.
    """
    found: list[HeadwaterError] = []

    def is_abandoned() -> bool:
        with pytest.raises(InvalidRequest) as caught:
            read()
        found.append(caught.value)
        return len(abandoned) > 0

    wait_until(is_abandoned, "a statement to be abandoned")
    return found[-1]


def running(db: Any, start: str) -> bool:
    """Return whether PostgreSQL runs a statement that begins so."""
    found = db.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE starts_with(query, %s) AND state = 'active'", [start]
    ).fetchone()
    return found != (0,)


# --- statements that PostgreSQL does not end ----------------------------------------------------------------


@pytest.mark.usefixtures("hasty")
def test_statement_without_interrupts_is_abandoned_at_its_limit(pg: Server) -> None:
    pool = Pool(pg.connect, 1, AbandonedStatements(1))
    error = abandon(lambda: pool.read(lambda link: link.run(DEAF, max_rows=1), 0.5), pool.abandoned)
    assert state_of(error) == CANCELED
    with pytest.raises(Busy, match="1 statements"):
        pool.read(lambda link: link.run("SELECT 1"), 0.5)
    assert pool.read(lambda link: link.run("SELECT 1")).rows == [(b"1",)], "our own reads go on"
    pool.close()
    with pg.connect() as admin:
        assert running(admin, "SELECT strpos"), "nobody waited for it"


@pytest.mark.usefixtures("hasty")
def test_statement_is_accepted_once_abandoned_ones_have_ended(pg: Server) -> None:
    pool = Pool(pg.connect, 1, AbandonedStatements(1))
    abandon(lambda: pool.read(lambda link: link.run(DEAF, max_rows=1), 0.5), pool.abandoned)

    def is_accepted() -> bool:
        try:
            return bool(pool.read(lambda link: link.run("SELECT 1"), 5).rows)
        except Busy:
            return False

    wait_until(is_accepted, "the abandoned statement to end")
    assert len(pool.abandoned) == 0
    pool.close()


def as_caller(name: str, call: Callable[..., Any], *args: Any) -> Any:
    """Return `call(*args)` as a thread of this caller runs it."""
    context = contextvars.copy_context()
    context.run(CALLER.set, name)
    return context.run(call, *args)


def test_caller_with_an_abandoned_statement_is_refused_alone() -> None:
    abandoned = AbandonedStatements()
    abandoned.add(7, "eve")
    assert abandoned.may_refuse("eve") and abandoned.may_refuse("eve", is_trusted=True)
    assert not any(abandoned.may_refuse(name) for name in ("alice", "", "anonymous"))
    with pytest.raises(Busy, match="a statement of yours"):
        abandoned.check(lambda processes: dict.fromkeys(processes, "today"), "eve")
    abandoned.check(lambda processes: dict.fromkeys(processes, "later"), "eve")  # another process by this number
    assert len(abandoned) == 0 and not abandoned.may_refuse("eve")


def test_too_many_abandoned_statements_refuse_all_but_trusted_work() -> None:
    abandoned = AbandonedStatements()
    for number in range(MOST):
        assert not abandoned.may_refuse("alice")
        abandoned.add(number, f"caller {number % 3}")
    for name in ("alice", "", "anonymous"):
        assert abandoned.may_refuse(name) and not abandoned.may_refuse(name, is_trusted=True)
    abandoned.check(lambda processes: dict.fromkeys(processes, None), "alice", is_trusted=True)
    with pytest.raises(Busy, match=f"{MOST} statements"):
        abandoned.check(lambda processes: dict.fromkeys(processes, None), "alice")
    abandoned.check(lambda processes: {}, "alice")
    assert len(abandoned) == 0


def test_callers_without_authentication_are_no_single_caller() -> None:
    abandoned = AbandonedStatements()
    abandoned.add(1, "")
    abandoned.add(2, "anonymous")
    assert not abandoned.may_refuse("") and not abandoned.may_refuse("anonymous")


@pytest.mark.usefixtures("hasty")
def test_only_the_caller_of_an_abandoned_query_is_refused(tmp_path: Path) -> None:
    logins = {"reader": f"deaf_reader_{os.getpid()}", "writer": f"deaf_writer_{os.getpid()}"}
    site = Site(shared_server(), f"deaf_{os.getpid()}", tmp_path, statement_seconds=0.5, **logins)
    try:

        def code_of_deaf() -> str:
            answer = site.call("viewer", "query.select", sql=f"{DEAF}, id FROM orders WHERE id = 1")
            return str(answer.get("error", {}).get("code"))

        # PostgreSQL may still end one in time, before it calls the function.
        wait_until(lambda: code_of_deaf() == "busy", "a statement was abandoned, and the next one is refused")
        plain = {"sql": "SELECT id FROM orders WHERE id = 2"}
        assert site.refused("viewer", "query.select", **plain) == "busy"
        for role in ("editor", "owner"):  # which PostgreSQL may end, too, on a busy machine
            wait_until(lambda role=role: site.call(role, "query.select", **plain)["ok"], f"an answer to {role}")
    finally:
        wait_until(lambda: not running(site.db, DEAF), "PostgreSQL ends the statement by itself")
        names = ", ".join(logins.values())
        site.db.execute(f"DROP OWNED BY {names}".encode())
        site.close()
        with shared_server().connect() as admin:
            admin.execute(f"DROP ROLE {names}".encode())


@pytest.mark.usefixtures("hasty")
def test_read_of_another_caller_is_accepted_during_an_abandoned_statement(pg: Server) -> None:
    pool = Pool(pg.connect, 1)
    abandon(lambda: as_caller("eve", pool.read, lambda link: link.run(DEAF, max_rows=1), 0.5), pool.abandoned)
    for read in (pool.read, pool.probe):
        with pytest.raises(Busy, match="a statement of yours"):
            as_caller("eve", read, lambda link: link.run("SELECT 1"), 5)
    assert as_caller("alice", pool.read, lambda link: link.run("SELECT 1"), 5).rows == [(b"1",)]
    assert pool.read(lambda link: link.run("SELECT 1"), 5).rows == [(b"1",)]
    pool.close()


@pytest.mark.usefixtures("hasty")
def test_write_of_another_caller_is_accepted_during_an_abandoned_statement(pg_rig: Callable[..., Rig]) -> None:
    rig = pg_rig("CREATE TABLE t (id int PRIMARY KEY)", statement_seconds=0.5)

    def write(caller: str, sql: str) -> Any:
        return rig.writers.submit(lambda session: session.execute(sql), caller=caller).result(PATIENCE)

    def is_ended_in_time(caller: str, sql: str) -> bool:
        """Return whether the statement ended without reaching PostgreSQL's time limit."""
        try:
            write(caller, sql)
        except InvalidRequest as error:
            assert state_of(error) == CANCELED
            return False
        return True

    def is_refused() -> bool:
        """Return whether a statement of eve is refused, after one that was abandoned: PostgreSQL may still end one in
        time.
        """
        try:
            return is_ended_in_time("eve", f"INSERT INTO t {DEAF}")
        except Busy as error:
            assert "a statement of yours" in error.message
            return True

    wait_until(is_refused, "a statement was abandoned, and the next one is refused")
    wait_until(lambda: is_ended_in_time("alice", "INSERT INTO t VALUES (2)"), "the statement of another caller")
    wait_until(lambda: not running(rig.stream.db, "INSERT INTO t SELECT strpos"), "the end of the statement")
    wait_until(lambda: is_ended_in_time("eve", "INSERT INTO t VALUES (1)"), "the statement of the same caller")
    assert rig.stream.db.execute("SELECT id FROM t ORDER BY id").fetchall() == [(1,), (2,)]


def test_severed_transaction_is_counted_for_its_caller(pg: Server) -> None:
    abandoned = AbandonedStatements()
    link = Link(pg.connect, abandoned)
    as_caller("eve", lambda: link.begin(seconds=5))
    link.sever()  # by the clock of the transaction, a thread of no caller
    assert abandoned.may_refuse("eve") and not abandoned.may_refuse("alice")
    link.close()


def test_statement_that_can_be_interrupted_is_ended_by_postgres(pg: Server) -> None:
    pool = Pool(pg.connect, 1)
    with pytest.raises(InvalidRequest) as found:
        pool.read(lambda link: link.run("SELECT pg_sleep(60)", max_rows=1), 0.3)
    assert state_of(found.value) == CANCELED and len(pool.abandoned) == 0
    pool.close()


@pytest.mark.usefixtures("hasty")
def test_transaction_with_statement_without_interrupts_ends_at_once(pg_rig: Callable[..., Rig]) -> None:
    rig = pg_rig("CREATE TABLE t (id int PRIMARY KEY)")
    tx = rig.begin()
    step = tx.run(lambda session: session.execute(f"INSERT INTO t {DEAF}"))
    wait_until(lambda: running(rig.stream.db, "INSERT INTO t SELECT strpos"), "the statement to run")
    tx.expire()
    assert running(rig.stream.db, "INSERT INTO t SELECT strpos"), "nobody waited for it"
    with pytest.raises((TxExpired, SourceError)):
        step.result(PATIENCE)
    wait_until(lambda: not running(rig.stream.db, "INSERT INTO t SELECT strpos"), "the end of the statement")


# --- large errors -------------------------------------------------------------------------------------------


def test_error_text_beyond_limit_closes_the_connection(pg: Server) -> None:
    link = Link(pg.connect)
    link.begin()
    with pytest.raises(InvalidRequest) as found:
        link.run(f"SELECT {LARGE}", max_bytes=WORDS)
    assert not link.is_alive and len(found.value.message) <= 1_100


@pytest.mark.parametrize("size", [500, 100_000, 5_000_000])
def test_error_text_of_callers_statement_is_cut(pg: Server, size: int) -> None:
    link = Link(pg.connect)
    link.begin()
    with pytest.raises(HeadwaterError) as found:
        link.run(f"SELECT repeat('x', {size})::int", max_rows=1)
    assert len(found.value.message) <= 1_100 and state_of(found.value) == "22P02"
    assert link.is_alive == (size < WORDS)
    link.close()


def test_notices_are_not_received(pg: Server) -> None:
    link = Link(pg.connect)
    seen: list[Any] = []
    link._connection.add_notice_handler(seen.append)
    link.begin()
    link.run("DO $$BEGIN RAISE NOTICE '%', repeat('x', 100000); RAISE WARNING 'x'; END$$")
    link.close()
    assert seen == []


def test_large_error_is_not_sent_to_callers(site: Site) -> None:
    where = f"{LARGE} = id"
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("viewer", "cdc.subscribe_table", {"table": "orders", "where": where}),
        ("viewer", "cdc.backtest", {"table": "orders", "where": "(note || repeat('x', 50000000 + id))::int = 1"}),
        ("viewer", "query.select", {"sql": f"SELECT {LARGE}"}),
        (
            "viewer",
            "query.select",
            {"sql": "SELECT (note || repeat('x', 50000000 + id))::int FROM orders"},
        ),
        ("editor", "sql.exec", {"sql": f"SELECT {LARGE}"}),
        ("editor", "sql.exec", {"sql": "SELECT repeat('x', 50000000) = note FROM orders"}),
    ]
    for role, method, params in asked:
        answer = site.call(role, method, **params)
        assert len(str(answer)) < 5_000, (role, method)
    changes = site.callers["viewer"].get("/api/v1/changes/main/orders", params={"where": where})
    assert changes.status_code >= 400 and len(changes.text) < 5_000


# --- large statements ---------------------------------------------------------------------------------------


def test_statement_with_large_tree_is_refused(site: Site) -> None:
    sql = f"SELECT id FROM orders WHERE id IN ({','.join(['1'] * 33_000)})"
    for role, method in (("viewer", "query.select"), ("viewer", "query.prepare"), ("editor", "sql.exec")):
        answer = site.call(role, method, sql=sql)
        assert answer["error"]["code"] == "invalid_request" and str(MAX_TREE) in answer["error"]["message"], answer


def test_long_statement_is_refused_unless_from_owner(site: Site) -> None:
    sql = f"SELECT 1 --{'x' * MAX_TEXT}"
    assert site.refused("editor", "sql.exec", sql=sql) == "invalid_request"
    assert site.refused("viewer", "query.select", sql=sql) == "invalid_request"
    assert site.call("owner", "sql.exec", sql=sql)["ok"]


@pytest.mark.parametrize("text", ["x", '"', "'", "/*", "$a$b", "$", "(", '"a" ', "lo_", "/**/", " "])
def test_text_of_a_repeated_sign_is_scanned_in_linear_time(text: str) -> None:
    sql = "SELECT " + text * (MAX_TEXT // len(text) - 10)
    for look in (check_allowed, marked, lambda sql: placed(sql, {"a": 1})):
        with contextlib.suppress(HeadwaterError):
            look(sql)
    assert not _CALLED.findall(sql) or "(" in text
    _CALLED_QUOTED.findall(sql)


# --- PostgreSQL away ----------------------------------------------------------------------------------------


def test_error_for_callers_without_postgres_does_not_show_its_address(
    caplog: pytest.LogCaptureFixture, pg: Server
) -> None:
    address = Address("main", f"postgresql://postgres@/postgres?host={pg.folder}/nowhere")
    with pytest.raises(SourceError) as found:
        Pool(address.connect).read(lambda link: link.run("SELECT 1"))
    assert "nowhere" not in str(found.value.message) + found.value.hint and "nowhere" in caplog.text
