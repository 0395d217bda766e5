"""What the clients of a nemesis do: every kind of write, also those that must fail, each under its own mark."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from server_process import Asking, Gone, Refused

KEYS = 400
# Nothing was kept: the answer says so. `unavailable` and the like leave it open.
NOTHING_KEPT = {"duplicate_key", "invalid_request", "conflict", "not_found", "tx_expired", "busy"}
OPEN_END = {"unavailable", "storage_full"}

SCHEMA = (
    "CREATE TABLE account(id INTEGER PRIMARY KEY, balance INTEGER, mark TEXT)",
    "CREATE TABLE audit(n INTEGER PRIMARY KEY, account INTEGER, mark TEXT)",
    "CREATE TRIGGER audit_account AFTER UPDATE OF balance ON account BEGIN "
    "INSERT INTO audit(account, mark) VALUES (NEW.id, NEW.mark); END",
    "CREATE TABLE note(k TEXT PRIMARY KEY, u UNIQUE, v, mark TEXT) WITHOUT ROWID",
    "CREATE TABLE line(x, mark TEXT)",
    "CREATE TABLE ledger(mark TEXT PRIMARY KEY, n)",  # only ever added to
    "CREATE TABLE parent(id INTEGER PRIMARY KEY, mark TEXT)",
    "CREATE TABLE child(id INTEGER PRIMARY KEY, mark TEXT, "
    "parent INTEGER REFERENCES parent(id) ON DELETE CASCADE DEFERRABLE INITIALLY DEFERRED)",
)


class History:
    """What clients were told. Used from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.acknowledged: dict[str, int] = {}
        self.refused: set[str] = set()
        self.defects: list[str] = []
        self.codes: Counter[str] = Counter()

    def acknowledge(self, mark: str, changes: int) -> None:
        with self._lock:
            self.acknowledged[mark] = changes

    def refuse(self, mark: str) -> None:
        with self._lock:
            self.refused.add(mark)

    def defect(self, text: str) -> None:
        with self._lock:
            self.defects.append(text)

    def saw(self, code: str) -> None:
        with self._lock:
            self.codes[code] += 1

    def __len__(self) -> int:
        return len(self.acknowledged)


class Client:
    """One thread's dice and connection."""

    def __init__(self, ask: Asking, history: History, dice: random.Random, name: str, *, ddl: bool) -> None:
        self.ask, self.history, self.random, self.name = ask, history, dice, name
        self.count, self.added = 0, 0
        self.side: list[str] = []
        self.works: list[tuple[int, Callable[[str], int]]] = [
            (8, self.insert),
            (8, self.update),
            (3, self.delete),
            (4, self.bad_row_three),
            (4, self.replace),
            (4, self.upsert),
            (3, self.move_key),
            (2, self.or_rollback),
            (2, self.orphan),
            (2, self.cascade),
            (8, self.transaction),
            (1, self.overdue),
            (2 if ddl else 0, self.schema),
        ]

    def run(self, stop: threading.Event) -> None:
        """Work until told to stop."""
        weights = [weight for weight, _ in self.works]
        while not stop.is_set():
            self.count += 1
            (_, work), mark = self.random.choices(self.works, weights)[0], f"{self.name}-{self.count}"
            self.attempt(work, mark)
        self.ask.close()

    def attempt(self, work: Callable[[str], int], mark: str) -> None:
        """One work, and what its client was told."""
        try:
            self.history.acknowledge(mark, work(mark))
            self.history.saw("ok")
            self.history.saw(f"{work.__name__} ok")
        except Refused as error:
            self.history.saw(f"{work.__name__} {error.code}")
            if error.code in NOTHING_KEPT:
                self.history.refuse(mark)
            elif error.code not in OPEN_END:
                self.history.defect(f"{work.__name__}: {error}")
        except Gone:
            self.history.saw("gone")
            time.sleep(0.02)  # the server is down: others work meanwhile

    def sql(self, text: str, *args: Any, **more: Any) -> int:
        return int(self.ask("sql.exec", sql=text, args=list(args), **more)["result"]["affected"])

    def key(self) -> int:
        return self.random.randrange(KEYS)

    def row(self, mark: str) -> dict[str, Any]:
        return {"id": self.random.randrange(KEYS, 10**9), "balance": self.key(), "mark": mark}

    # Each returns how many changes that leave a row with its mark the log must have.

    def insert(self, mark: str) -> int:
        rows = [self.row(mark) for _ in range(self.random.choice((1, 1, 2, 5)))]
        return int(self.ask("data.insert", into={"table": "account"}, rows=rows)["affected"])

    def update(self, mark: str) -> int:
        where = {"op": "eq", "a": {"col": "id"}, "b": {"param": 0}}
        values = {"balance": self.key(), "mark": mark}
        return 2 * int(
            self.ask("data.update", table={"table": "account"}, where=where, args=[self.key()], set=values)["affected"]
        )

    def delete(self, mark: str) -> int:
        where = {"op": "eq", "a": {"col": "id"}, "b": {"param": 0}}
        self.ask("data.delete", table={"table": "account"}, where=where, args=[self.key()])
        return 0

    def bad_row_three(self, mark: str) -> int:
        rows = [self.row(mark), self.row(mark)]
        self.ask("data.insert", into={"table": "account"}, rows=[*rows, rows[0]])
        self.history.defect(f"{mark}: a duplicate key was accepted")
        return 3

    def replace(self, mark: str) -> int:
        sql = "INSERT OR REPLACE INTO account(id, balance, mark) VALUES (?, 1, ?), (?, 2, ?)"
        return self.sql(sql, self.key(), mark, self.key(), mark)

    def upsert(self, mark: str) -> int:
        sql = (
            "INSERT INTO note(k, u, v, mark) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (k) DO UPDATE SET v = excluded.v, mark = excluded.mark"
        )
        return self.sql(sql, f"k{self.key() % 40}", self.key() % 40, "é\x00", mark)

    def move_key(self, mark: str) -> int:
        verb = self.random.choice(("UPDATE", "UPDATE OR REPLACE", "UPDATE OR IGNORE"))
        return self.sql(f"{verb} account SET id = ?, mark = ? WHERE id = ?", self.key(), mark, self.key())

    def or_rollback(self, mark: str) -> int:
        sql = "INSERT OR ROLLBACK INTO ledger(mark, n) VALUES (?, 1), (?, 2)"
        self.sql(sql, mark, mark)
        self.history.defect(f"{mark}: a duplicate key was accepted")
        return 2

    def orphan(self, mark: str) -> int:
        self.sql("INSERT INTO child(id, mark, parent) VALUES (NULL, ?, -1)", mark)
        self.history.defect(f"{mark}: a child without a parent was accepted")
        return 1

    def cascade(self, mark: str) -> int:
        tx = self.ask("tx.begin")["tx"]
        changes = self.step(tx, "INSERT OR REPLACE INTO parent(id, mark) VALUES (?, ?)", self.key() % 5, mark)
        changes += self.step(tx, "INSERT INTO child(mark, parent) SELECT ?, id FROM parent", mark)
        self.step(tx, "DELETE FROM parent WHERE id = ?", self.key() % 5)
        return self.commit(tx, changes)

    def transaction(self, mark: str) -> int:
        tx = self.ask("tx.begin")["tx"]
        changes = self.step(tx, "INSERT INTO ledger(mark, n) VALUES (?, ?)", mark, self.count)
        for _ in range(self.random.randrange(4)):
            changes += self.some_step(tx, mark)
        if self.random.random() < 0.2:
            self.ask("tx.rollback", tx=tx)
            raise Refused({"code": "tx_expired", "message": "rolled back on purpose"})
        return self.commit(tx, changes)

    def some_step(self, tx: str, mark: str) -> int:
        low = self.key()
        match self.random.randrange(4):
            case 0:
                sql = "UPDATE account SET balance = balance + 1, mark = ? WHERE id BETWEEN ? AND ?"
                return 2 * self.step(tx, sql, mark, low, low + 3)
            case 1:
                return self.step(tx, "INSERT INTO line(x, mark) VALUES (?, ?), (-0.0, ?)", 2**62, mark, mark)
            case 2:
                self.step(tx, "DELETE FROM account WHERE id = ?", low)
                return 0
            case _:  # a statement that fails undoes only itself
                try:
                    return self.step(tx, "INSERT INTO ledger(mark, n) VALUES (?, 1), (?, 2)", mark + "x", mark)
                except Refused as error:
                    if error.code != "duplicate_key":
                        raise
                    return 0

    def overdue(self, mark: str) -> int:
        tx = self.ask("tx.begin")["tx"]
        changes = self.step(tx, "INSERT INTO ledger(mark, n) VALUES (?, ?)", mark, self.count)
        time.sleep(0.3)  # longer than the server lets a transaction hold the writer idle
        return self.commit(tx, changes)

    def step(self, tx: str, sql: str, *args: Any) -> int:
        """A statement inside; without an answer nothing can have been committed."""
        try:
            return self.sql(sql, *args, tx=tx)
        except Gone as error:
            raise Refused({"code": "tx_expired", "message": "never committed"}) from error

    def commit(self, tx: str, changes: int) -> int:
        self.ask("tx.commit", tx=tx)
        return changes

    def schema(self, mark: str) -> int:
        if self.side and self.random.random() < 0.6:
            self.ask("schema.drop_table", table=self.side.pop())
            return 0
        if self.added < 4 and self.random.random() < 0.5:
            self.added += 1
            table = self.random.choice(("account", "note", "ledger"))
            self.sql(f"ALTER TABLE {table} ADD COLUMN {self.name}_{self.count} DEFAULT 'x'")
            return 0
        name = f"side_{self.name}_{self.count}"
        self.sql(f"CREATE TABLE {name}(id INTEGER PRIMARY KEY, mark TEXT)")
        self.side.append(name)
        return self.sql(f"INSERT INTO {name}(mark) VALUES (?), (?)", mark, mark)
