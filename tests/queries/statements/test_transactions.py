"""Interactive transactions: who may use them, what they see, how they end."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.queries.open_databases import Files
from tests.suite.deadlines import PATIENCE

from headwater.errors import Busy, Conflict, DuplicateKey, HeadwaterError, InvalidRequest, NotFound, TxExpired
from headwater.model.predicate import eq
from headwater.model.principal import ANONYMOUS, EDITOR, VIEWER, Principal, Scope
from headwater.queries.rows.rows import Rows, TableAddress
from headwater.queries.statements.pending_answer import PendingAnswer
from headwater.queries.statements.sql import Statement
from headwater.queries.statements.transactions import Transactions, one_tx

USERS = TableAddress("users")
MALLORY = Principal("mallory")


@pytest.fixture
def files(tmp_path: Path) -> Any:
    with Files(tmp_path) as found:
        found.run("CREATE TABLE users (id INTEGER PRIMARY KEY, email TEXT UNIQUE)")
        yield found


@pytest.fixture
def transactions(files: Files) -> Any:
    found = Transactions(files, most=3)
    yield found
    found.close()


def see(found: Any) -> Any:
    return found.result(PATIENCE) if isinstance(found, PendingAnswer) else found


def test_insert_in_a_transaction_is_visible_to_others_only_after_commit(
    files: Files, transactions: Transactions
) -> None:
    rows = Rows(files, transactions)
    tx = transactions.begin(ANONYMOUS).tx
    done = rows.insert(ANONYMOUS, USERS, [{"email": "a"}], tx=tx).result(PATIENCE)
    assert done.causality is None
    found = see(rows.get(ANONYMOUS, USERS, [1], tx=tx))
    assert (found.row, found.etag) == ((1, "a"), None)
    with pytest.raises(NotFound):
        rows.get(ANONYMOUS, USERS, [1])
    over = transactions.commit(ANONYMOUS, tx).result(PATIENCE)
    assert over.status == "committed"
    assert over.causality is not None
    assert [(dep.table, dep.v) for dep in over.causality.deps] == [("main.users", files.get("main").head())]
    assert see(rows.get(ANONYMOUS, USERS, [1])).etag


def test_rolled_back_insert_is_not_found_and_takes_no_offset(files: Files, transactions: Transactions) -> None:
    rows = Rows(files, transactions)
    head = files.get("main").head()
    tx = transactions.begin(ANONYMOUS).tx
    rows.insert(ANONYMOUS, USERS, [{"email": "a"}], tx=tx).result(PATIENCE)
    assert transactions.rollback(ANONYMOUS, tx).result(PATIENCE).status == "rolled_back"
    assert files.get("main").head() == head
    with pytest.raises(NotFound):
        rows.get(ANONYMOUS, USERS, [1])


def test_failed_statement_in_a_transaction_rolls_back_only_that_statement(
    files: Files, transactions: Transactions
) -> None:
    rows = Rows(files, transactions)
    tx = transactions.begin(ANONYMOUS).tx
    rows.insert(ANONYMOUS, USERS, [{"email": "a"}], tx=tx).result(PATIENCE)
    with pytest.raises(DuplicateKey):
        rows.insert(ANONYMOUS, USERS, [{"email": "b"}, {"email": "a"}], tx=tx).result(PATIENCE)
    transactions.commit(ANONYMOUS, tx).result(PATIENCE)
    assert files.rows("SELECT email FROM users") == [("a",)]


def test_update_in_a_transaction_checks_if_match_but_returns_no_etag(files: Files, transactions: Transactions) -> None:
    rows = Rows(files, transactions)
    rows.insert(ANONYMOUS, USERS, [{"email": "a"}]).result(PATIENCE)
    tag = see(rows.get(ANONYMOUS, USERS, [1])).etag
    tx = transactions.begin(ANONYMOUS).tx
    done = rows.update(ANONYMOUS, USERS, eq("id", 1), {"email": "b"}, if_match=tag, tx=tx).result(PATIENCE)
    assert (done.affected, done.etag) == (1, None)
    with pytest.raises(Conflict):
        rows.update(ANONYMOUS, USERS, eq("id", 1), {"email": "c"}, if_match=tag, tx=tx).result(PATIENCE)
    transactions.rollback(ANONYMOUS, tx).result(PATIENCE)


@pytest.mark.parametrize("finish", ["commit", "rollback"])
def test_commit_or_rollback_of_a_finished_transaction_raises_not_found(transactions: Transactions, finish: str) -> None:
    tx = transactions.begin(ANONYMOUS).tx
    getattr(transactions, finish)(ANONYMOUS, tx).result(PATIENCE)
    for again in (transactions.commit, transactions.rollback):
        with pytest.raises(NotFound):
            again(ANONYMOUS, tx)
    with pytest.raises(NotFound):
        transactions.commit(ANONYMOUS, "no-such")


def test_transaction_of_another_principal_is_not_found(files: Files, transactions: Transactions) -> None:
    rows = Rows(files, transactions)
    tx = transactions.begin(ANONYMOUS).tx
    for use in (
        lambda: transactions.commit(MALLORY, tx),
        lambda: transactions.rollback(MALLORY, tx),
        lambda: rows.insert(MALLORY, USERS, [{"email": "x"}], tx=tx),
        lambda: rows.get(MALLORY, USERS, [1], tx=tx),
    ):
        with pytest.raises(NotFound):
            use()
    transactions.rollback(ANONYMOUS, tx).result(PATIENCE)


def test_write_to_another_database_than_that_of_the_transaction_is_rejected(
    files: Files, transactions: Transactions
) -> None:
    files.create("other")
    files.run("CREATE TABLE users (id INTEGER PRIMARY KEY, email TEXT)", db="other")
    rows = Rows(files, transactions)
    tx = transactions.begin(ANONYMOUS, db="other").tx
    with pytest.raises(InvalidRequest):
        rows.insert(ANONYMOUS, TableAddress("users", "main"), [{"email": "x"}], tx=tx)
    rows.insert(ANONYMOUS, TableAddress("users"), [{"email": "x"}], tx=tx).result(PATIENCE)
    transactions.commit(ANONYMOUS, tx).result(PATIENCE)
    assert files.rows("SELECT email FROM users", db="other") == [("x",)]
    with pytest.raises(NotFound):
        transactions.begin(ANONYMOUS, db="nowhere")


def test_too_many_open_transactions_are_refused_until_one_ends(transactions: Transactions) -> None:
    held = [transactions.begin(ANONYMOUS, read_only=True).tx for _ in range(3)]
    with pytest.raises(Busy):
        transactions.begin(ANONYMOUS)
    transactions.rollback(ANONYMOUS, held[0]).result(PATIENCE)
    held[0] = transactions.begin(ANONYMOUS).tx
    for tx in held:
        transactions.rollback(ANONYMOUS, tx).result(PATIENCE)
    assert len(transactions) == 0


def test_idle_transactions_expire_and_make_room_for_new_ones(files: Files) -> None:
    now = [0.0]
    transactions = Transactions(files, most=2, clock=lambda: now[0])
    old = [transactions.begin(ANONYMOUS, read_only=True).tx for _ in range(2)]
    now[0] = 61.0
    fresh = transactions.begin(ANONYMOUS).tx
    for tx in old:
        with pytest.raises(TxExpired):
            transactions.commit(ANONYMOUS, tx)
    transactions.rollback(ANONYMOUS, fresh).result(PATIENCE)


def test_read_only_transaction_reads_one_snapshot_and_rejects_writes(files: Files, transactions: Transactions) -> None:
    rows, statement = Rows(files, transactions), Statement(files, transactions)
    tx = transactions.begin(ANONYMOUS, read_only=True).tx
    count = "SELECT count(*) FROM users"
    assert see(statement.execute(ANONYMOUS, count, tx=tx)).rows == ((0,),)
    rows.insert(ANONYMOUS, USERS, [{"email": "a"}]).result(PATIENCE)
    assert see(statement.execute(ANONYMOUS, count, tx=tx)).rows == ((0,),)
    with pytest.raises(HeadwaterError):
        rows.insert(ANONYMOUS, USERS, [{"email": "b"}], tx=tx).result(PATIENCE)
    transactions.rollback(ANONYMOUS, tx).result(PATIENCE)
    assert files.rows("SELECT email FROM users") == [("a",)]


def test_expired_transaction_raises_tx_expired_to_its_owner_and_not_found_to_others(files: Files) -> None:
    with Files(files.folder / "short", tx_seconds=PATIENCE, tx_idle_seconds=0.2) as short:
        short.run("CREATE TABLE users (id INTEGER PRIMARY KEY, email TEXT)")
        transactions = Transactions(short)
        rows = Rows(short, transactions)
        tx = transactions.begin(ANONYMOUS).tx
        rows.insert(ANONYMOUS, USERS, [{"email": "a"}], tx=tx).result(PATIENCE)
        # Another writer waits until the first has expired.
        rows.insert(ANONYMOUS, USERS, [{"email": "b"}]).result(PATIENCE)
        with pytest.raises(HeadwaterError) as found:
            rows.insert(ANONYMOUS, USERS, [{"email": "c"}], tx=tx).result(PATIENCE)
        assert (found.value.code, found.value.retryable) == ("tx_expired", True)
        with pytest.raises(TxExpired):
            transactions.commit(ANONYMOUS, tx)
        with pytest.raises(NotFound):
            transactions.commit(MALLORY, tx)
        assert short.rows("SELECT email FROM users") == [("b",)]


def test_transactions_ended_by_a_reopened_database_make_room_for_new_ones(files: Files) -> None:
    transactions = Transactions(files, most=2)
    old = [transactions.begin(ANONYMOUS).tx for _ in range(2)]
    files.get("main").reopen()
    assert len(transactions) == 0
    fresh = [transactions.begin(ANONYMOUS).tx for _ in range(2)]
    for tx in old:
        with pytest.raises(TxExpired):
            transactions.commit(ANONYMOUS, tx).result(PATIENCE)
    for tx in fresh:
        transactions.rollback(ANONYMOUS, tx).result(PATIENCE)


@pytest.mark.parametrize("end", ["reopen", "finish_writes"])
def test_transaction_open_while_its_database_closes_returns_tx_expired(tmp_path: Path, end: str) -> None:
    with Files(tmp_path) as files:
        files.run("CREATE TABLE users (id INTEGER PRIMARY KEY, email TEXT)")
        transactions = Transactions(files)
        rows, statement = Rows(files, transactions), Statement(files, transactions)
        read, wrote, finished = (transactions.begin(ANONYMOUS).tx for _ in range(3))
        rows.insert(ANONYMOUS, USERS, [{"email": "a"}], tx=wrote).result(PATIENCE)
        getattr(files.get("main"), end)()
        for use in (
            lambda: statement.execute(ANONYMOUS, "SELECT 1", tx=read),
            lambda: rows.insert(ANONYMOUS, USERS, [{"email": "b"}], tx=wrote),
            lambda: transactions.rollback(ANONYMOUS, read),
            lambda: transactions.commit(ANONYMOUS, wrote),
            lambda: transactions.commit(ANONYMOUS, finished),
        ):
            with pytest.raises(TxExpired):
                see(use())


def test_transaction_limit_holds_under_concurrent_begins(files: Files) -> None:
    transactions = Transactions(files, most=4)
    start = threading.Barrier(12)

    def begin(_: int) -> str:
        start.wait(PATIENCE)
        try:
            return transactions.begin(ANONYMOUS, read_only=True).tx
        except Busy:
            return ""

    with ThreadPoolExecutor(12) as pool:
        begun = [tx for tx in pool.map(begin, range(12)) if tx]
    assert len(begun) == len(transactions) == 4
    transactions.close()


def test_tx_and_tx_id_that_differ_or_are_both_missing_are_rejected() -> None:
    assert one_tx("a", None) == one_tx(None, "a") == one_tx("a", "a") == "a"
    for tx, tx_id in ((None, None), ("a", "b")):
        with pytest.raises(InvalidRequest):
            one_tx(tx, tx_id)


def test_caller_below_owner_may_open_a_quarter_of_the_transactions(files: Files) -> None:
    transactions = Transactions(files, most=8)
    viewer, other = Principal("v", VIEWER, until=4), Principal("w", EDITOR)
    mine = [transactions.begin(viewer, read_only=True).tx for _ in range(2)]
    with pytest.raises(Busy, match="your transactions"):
        transactions.begin(viewer, read_only=True)
    with pytest.raises(Busy):
        transactions.begin(Principal("v", VIEWER, until=5), read_only=True)
    held = [transactions.begin(other, read_only=True).tx for _ in range(2)]
    with pytest.raises(Busy, match="open on database"):
        transactions.begin(Principal("x", VIEWER), read_only=True)
    owned = [transactions.begin(ANONYMOUS, read_only=True).tx for _ in range(4)]
    with pytest.raises(Busy, match="8 transactions"):
        transactions.begin(ANONYMOUS, read_only=True)
    for who, open in ((viewer, mine), (other, held), (ANONYMOUS, owned)):
        for tx in open:
            transactions.rollback(who, tx).result(PATIENCE)
    transactions.rollback(viewer, transactions.begin(viewer, read_only=True).tx).result(PATIENCE)


def test_transaction_limit_is_counted_per_key_not_per_name(files: Files) -> None:
    transactions = Transactions(files, most=8)
    ada, eve = (Principal("v", VIEWER, credential=id) for id in ("k1", "k2"))
    opened = [(who, transactions.begin(who, read_only=True).tx) for who in (ada, ada, eve, eve)]
    with pytest.raises(Busy, match="your transactions"):
        transactions.begin(eve, read_only=True)
    for who, tx in opened:
        transactions.rollback(who, tx).result(PATIENCE)


def test_causality_of_a_scoped_caller_names_only_tables_in_its_scopes(files: Files, transactions: Transactions) -> None:
    files.run("CREATE TABLE hidden (id INTEGER PRIMARY KEY, user REFERENCES users ON DELETE CASCADE)")
    files.run("CREATE TRIGGER copy AFTER INSERT ON users BEGIN INSERT INTO hidden VALUES (new.id, new.id); END")
    rows, scoped = Rows(files, transactions), Principal("ed", EDITOR, (Scope("main", ("users",)),))
    inserted = rows.insert(scoped, USERS, [{"email": "a"}]).result(PATIENCE).causality
    tx = transactions.begin(scoped).tx
    rows.insert(scoped, USERS, [{"email": "b"}], tx=tx).result(PATIENCE)
    committed = transactions.commit(scoped, tx).result(PATIENCE).causality
    for found in (inserted, committed):
        assert found is not None
        assert [dep.table for dep in found.deps] == ["main.users"]
    whole = rows.insert(ANONYMOUS, USERS, [{"email": "c"}]).result(PATIENCE).causality
    assert whole is not None
    assert {dep.table for dep in whole.deps} == {"main.users", "main.hidden"}
