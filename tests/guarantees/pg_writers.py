"""Writers of a PostgreSQL nemesis: sessions of other programs, and our clients, each under its own marks.

Foreign ones do what applications do to a database: transfers whose sum stays, moved keys, savepoints that are rolled
back, transactions that are large enough to be sent before they end, TRUNCATE, two-phase commits, changes of the schema.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
from tests.guarantees.writers import EQUAL, ApiWriter, History, Work
from tests.suite.deadlines import PATIENCE

Session = psycopg.Connection[tuple[Any, ...]]
ACCOUNTS, TOTAL = 20, 2_000
WAITING = 5  # the first accounts are those of transactions that are prepared: they stay locked for long
SCHEMA = (
    "CREATE TABLE item(id int PRIMARY KEY, n int, price float8, name text, mark text)",
    "CREATE TABLE pair(a text, b int, v text, mark text, PRIMARY KEY (a, b))",
    "CREATE TABLE account(id int PRIMARY KEY, balance int, mark text)",
    "CREATE TABLE ledger(mark text PRIMARY KEY, n int)",  # only ever added to
    "CREATE TABLE line(id bigserial PRIMARY KEY, x int, mark text)",
    "CREATE TABLE large(id int PRIMARY KEY, n int, big text, mark text)",
    "CREATE TABLE shifting(id bigserial PRIMARY KEY, mark text)",
    "ALTER TABLE large ALTER big SET STORAGE EXTERNAL",
    *(f"ALTER TABLE {name} REPLICA IDENTITY FULL" for name in ("item", "pair", "account", "shifting")),
    # Rows that were there before anybody listened.
    f"INSERT INTO account SELECT n, {TOTAL // ACCOUNTS}, 'first' FROM generate_series(1, {ACCOUNTS}) n",
    "INSERT INTO item SELECT n, n, n / 2.0, 'first', 'first' FROM generate_series(1, 40) n",
    "INSERT INTO large SELECT n, n, repeat('first', 800), 'first' FROM generate_series(1, 5) n",
)
# Nothing is waited for in vain: a transaction that was prepared holds its locks until somebody comes back to it.
SETTINGS = "-c lock_timeout=300 -c synchronous_commit=on"
OPEN_END = {"unavailable", "storage_full", "source_error"}


class Stop(Exception):
    """Roll the transaction back, by random choice."""


class PgWriter:
    """One session of another program; it reconnects after the server has restarted."""

    def __init__(
        self,
        connect: Callable[[str], Session],
        history: History,
        dice: random.Random,
        name: str,
        may_write: Callable[[], object],
        *,
        ddl: bool,
    ) -> None:
        self.connect, self.history, self.random, self.name = connect, history, dice, name
        self.may_write = may_write
        self.count = self.columns = 0
        self.db: Session | None = None
        self.prepared: list[tuple[str, int]] = []  # marks of transactions that wait, and their changes
        self.side: list[str] = []
        self.works: list[tuple[int, Work]] = [
            (12, self.transfer),
            (10, self.items),
            (5, self.move),
            (6, self.pairs),
            (6, self.savepoints),
            (5, self.lines),
            (1, self.bulk),
            (1, self.truncate),
            (5, self.toast),
            (4, self.prepare),
            (4 if ddl else 0, self.schema),
        ]

    def run(self, stop: threading.Event) -> None:
        """Write until `stop` is set, then decide all prepared transactions."""
        weights = [weight for weight, _ in self.works]
        while not stop.wait(self.random.random() * 0.04):
            self.may_write()
            self.count += 1
            (_, work), mark = self.random.choices(self.works, weights)[0], f"{self.name}-{self.count}"
            self.attempt(work, mark)
        end = time.monotonic() + PATIENCE
        while self.prepared and time.monotonic() < end:
            self.settle()
        self.leave()

    def attempt(self, work: Work, mark: str) -> None:
        """Run one transaction and record what its client knows of it."""
        committing = False
        try:
            db = self.session()
            db.execute("BEGIN")
            changes = work(mark)
            if changes < 0:
                return  # it went another way
            if self.random.random() < 0.15:
                raise Stop
            committing = True
            db.execute("COMMIT")
            self.history.acknowledge(mark, changes)
            self.history.saw(f"foreign {work.__name__}")
        except Stop:
            self.history.refuse(mark)
            self.leave(gently=True)
        except psycopg.Error as error:
            self.history.saw(f"foreign {type(error).__name__}")
            broken = self.db is None or self.db.closed
            is_open = committing and broken or any(mark == each for each, _ in self.prepared)
            if not is_open:
                self.history.refuse(mark)
            self.leave(gently=not broken)

    def session(self) -> Session:
        if self.db is None:
            try:
                self.db = self.connect(SETTINGS)
            except psycopg.OperationalError:
                time.sleep(0.05)  # the server is down: others try meanwhile
                raise
        return self.db

    def leave(self, *, gently: bool = False) -> None:
        """Roll back if `gently` and possible, else close the session."""
        if gently and self.db is not None:
            with contextlib.suppress(psycopg.Error):
                self.db.execute("ROLLBACK")
                return
        if self.db is not None:
            self.db.close()
        self.db = None

    def sql(self, text: str, *args: Any) -> int:
        assert self.db is not None
        return max(self.db.execute(text.encode(), args or None).rowcount, 0)

    def key(self) -> int:
        return self.random.randrange(60)

    # Each returns how many changes that leave a row with its mark the log must have.

    def transfer(self, mark: str) -> int:
        return self.pay(mark, range(WAITING + 1, ACCOUNTS + 1))

    def pay(self, mark: str, accounts: range) -> int:
        one, other = sorted(self.random.sample(accounts, 2))
        amount = self.random.randrange(1, 50) * self.random.choice((1, -1))
        text = "UPDATE account SET balance = balance + %s, mark = %s WHERE id = %s"
        return self.sql(text, amount, mark, one) + self.sql(text, -amount, mark, other)

    def items(self, mark: str) -> int:
        name = self.random.choice((None, "", "Ann", "ann", "Zoë", "x%"))
        price = self.random.choice((None, 0.5, -0.25, 7.0, 1e300))
        text = "INSERT INTO item VALUES (%s, %s, %s, %s, %s) ON CONFLICT (id) DO UPDATE SET "
        text += "n = excluded.n, price = excluded.price, name = excluded.name, mark = excluded.mark"
        changes = self.sql(text, self.key(), self.key(), price, name, mark)
        self.sql("DELETE FROM item WHERE id = %s", self.random.randrange(60, 120))
        return changes + self.sql("UPDATE item SET n = n + 1, mark = %s WHERE id = %s", mark, self.key())

    def move(self, mark: str) -> int:
        """Change keys; a key that is taken is refused."""
        changes = self.sql("UPDATE item SET id = id + 60, mark = %s WHERE id = %s", mark, self.key())
        return changes + self.sql("UPDATE large SET id = id + 10, mark = %s WHERE id = %s", mark, self.key() % 20)

    def pairs(self, mark: str) -> int:
        a, b = self.random.choice("abcdef"), self.random.randrange(6)
        self.sql("DELETE FROM pair WHERE a = %s AND b = %s", a, (b + 1) % 6)
        text = "INSERT INTO pair VALUES (%s, %s, %s, %s) ON CONFLICT (a, b) DO UPDATE SET v = excluded.v, mark = %s"
        changes = self.sql(text, a, b, self.random.choice((None, "b", "c", "A")), mark, mark)
        return changes + self.sql("UPDATE pair SET a = %s, mark = %s WHERE a = %s AND b = %s", a + "'", mark, a, b)

    def savepoints(self, mark: str) -> int:
        changes = self.sql("INSERT INTO ledger VALUES (%s, %s)", mark, self.count)
        for depth in range(self.random.randrange(1, 5)):
            self.sql(f"SAVEPOINT s{depth}")
            key = self.key()
            if self.random.random() < 0.5:
                self.sql("UPDATE item SET n = -1, mark = 'never' WHERE id BETWEEN %s AND %s", key, key + 5)
                self.sql(f"ROLLBACK TO s{depth}")
            else:
                changes += self.sql("UPDATE item SET n = %s, mark = %s WHERE id = %s", depth, mark, key)
                self.sql(f"RELEASE s{depth}")
        return changes

    def lines(self, mark: str) -> int:
        key = self.random.randrange(5_000)
        self.sql("DELETE FROM line WHERE id BETWEEN %s AND %s", key, key + 2_000)
        text = "UPDATE line SET x = x + 1, mark = %s WHERE id IN (SELECT id FROM line ORDER BY id DESC LIMIT %s)"
        changes = self.sql(text, mark, self.random.randrange(20))
        return changes + self.sql("INSERT INTO line(x, mark) SELECT n, %s FROM generate_series(1, 5) n", mark)

    def bulk(self, mark: str) -> int:
        """Insert enough rows to be streamed before the commit, roll some back, and make a transfer between."""
        rows = self.random.choice((100, 300, 700))
        text = "INSERT INTO line(x, mark) SELECT n, %s FROM generate_series(1, %s) n"
        changes = self.sql(text, mark, rows)
        self.sql("SAVEPOINT s")
        self.sql(text, "never", rows // 2)
        self.sql("ROLLBACK TO s")
        changes += self.transfer(mark)
        self.sql("SAVEPOINT s")
        changes += self.sql(text, mark, rows // 4)
        return changes

    def truncate(self, mark: str) -> int:
        self.sql("TRUNCATE line" + self.random.choice(("", ", pair")))
        return self.sql("INSERT INTO line(x, mark) VALUES (0, %s)", mark)

    def toast(self, mark: str) -> int:
        key = self.random.randrange(30)
        text = "INSERT INTO large VALUES (%s, 0, repeat(%s, 1000), %s) "
        text += "ON CONFLICT (id) DO UPDATE SET n = large.n + 1, mark = %s"
        changes = self.sql(text, key, self.random.choice("xyzé"), mark, mark)
        if self.random.random() < 0.2:
            changes += self.sql("UPDATE large SET big = repeat('w', 3000), mark = %s WHERE id = %s", mark, key)
        self.sql("DELETE FROM large WHERE id = %s", self.random.randrange(10, 60))
        return changes

    # --- two phases ------------------------------------------------------------------------------------------------

    def prepare(self, mark: str) -> int:
        """Prepare a transaction, or decide a prepared one, maybe from before a crash."""
        if self.prepared and self.random.random() < 0.6:
            self.sql("ROLLBACK")
            self.settle()
            return -1
        changes = self.sql("INSERT INTO ledger VALUES (%s, %s)", mark, self.count)
        changes += self.pay(mark, range(1, WAITING + 1))
        if self.random.random() < 0.3:
            changes += self.sql("INSERT INTO line(x, mark) SELECT n, %s FROM generate_series(1, 500) n", mark)
        self.prepared.append((mark, changes))  # before: whether it was done is not known if the session breaks
        self.sql(f"PREPARE TRANSACTION '{mark}'")
        return -1

    def settle(self) -> None:
        """Commit or roll back the oldest prepared transaction."""
        mark, changes = self.prepared[0]
        commit = self.random.random() < 0.7
        for verb in ("COMMIT", "ROLLBACK") if commit else ("ROLLBACK",):
            try:
                self.session().execute(f"{verb} PREPARED '{mark}'".encode())
                self._decided(mark, changes, verb)
                break
            except psycopg.errors.UndefinedObject:  # it never was, or a broken session had decided
                self.history.saw("foreign prepared unknown")
                break
            except psycopg.Error:
                self.leave()
                return
        self.prepared.pop(0)

    def _decided(self, mark: str, changes: int, verb: str) -> None:
        self.history.saw(f"foreign {verb} PREPARED")
        if verb == "COMMIT":
            self.history.acknowledge(mark, changes)
        else:
            self.history.refuse(mark)

    # --- the schema ------------------------------------------------------------------------------------------------

    def schema(self, mark: str) -> int:
        """Add, drop, retype or rename columns, or replace a table, in one transaction with rows."""
        self.columns += 1
        name = f"c{self.columns}"
        rows = self.random.choice((3, 3, 300))  # so many are sent before the end
        insert = f"INSERT INTO shifting(mark) SELECT %s FROM generate_series(1, {rows})"
        changes = self.sql(insert, mark) if self.random.random() < 0.5 else 0
        match self.random.randrange(7):
            case 0 | 1:
                self.sql(f"ALTER TABLE shifting ADD {name} {self.random.choice(('int', 'text', 'numeric'))}")
            case 2:
                self.sql(f"ALTER TABLE shifting ADD {name} int; ALTER TABLE shifting ALTER {name} TYPE text")
            case 3:
                self.sql(f"ALTER TABLE shifting ADD {name} int; ALTER TABLE shifting RENAME {name} TO r{name}")
            case 4:
                self.sql(f"ALTER TABLE shifting ADD {name} int DEFAULT 5; ALTER TABLE shifting DROP {name}")
            case 5 if self.side:
                self.sql(f"DROP TABLE {self.side.pop(0)}")
            case _:
                side = f"side_{self.name}_{self.columns}"
                self.sql(f"CREATE TABLE {side}(id serial PRIMARY KEY, mark text)")
                changes += self.sql(f"INSERT INTO {side}(mark) VALUES (%s), (%s)", mark, mark)
                self.side.append(side)
        changes += self.sql(insert, mark)
        # Each change of a shape is one of every row: there are to be few.
        self.sql("DELETE FROM shifting WHERE id < (SELECT max(id) - 10 FROM shifting)")
        return changes


class PgClient(ApiWriter):
    """One client of ours; the answers to its writes name their offsets in the log."""

    pause = 0.03
    open_end = OPEN_END
    keeps_places = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.works: list[tuple[int, Work]] = [
            (4, self.insert),
            (4, self.update),
            (1, self.delete),
            (2, self.statement),
            (4, self.transfer),
            (1, self.twice),
        ]

    def insert(self, mark: str) -> int:
        low = self.random.randrange(1_000, 1_000_000)
        rows = [{"id": low + n, "n": n, "price": 0.5, "name": "api", "mark": mark} for n in range(3)]
        return self.data("insert", into={"table": "item"}, rows=rows)

    def update(self, mark: str) -> int:
        values = {"n": self.count, "mark": mark}
        return self.data("update", table={"table": "item"}, where=EQUAL, args=[self.random.randrange(60)], set=values)

    def delete(self, mark: str) -> int:
        where = {**EQUAL, "op": "ge"}
        self.data("delete", table={"table": "item"}, where=where, args=[self.random.randrange(10**6)])
        return 0

    def statement(self, mark: str) -> int:
        return self.sql("INSERT INTO ledger(mark, n) VALUES ($1, $2)", mark, self.count)

    def twice(self, mark: str) -> int:
        self.sql("INSERT INTO ledger(mark, n) VALUES ($1, 1), ($1, 2)", mark)
        return self.must_fail(mark, 2, "a duplicate key")

    def transfer(self, mark: str) -> int:
        one, other = sorted(self.random.sample(range(WAITING + 1, ACCOUNTS + 1), 2))
        text = "UPDATE account SET balance = balance + $1, mark = $2 WHERE id = $3"
        tx = self.ask("tx.begin")["tx"]
        return self.commit(tx, self.step(tx, text, 7, mark, one) + self.step(tx, text, -7, mark, other))
