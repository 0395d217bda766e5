"""Clients of the log's nemesis on SQLite: every kind of write, also writes that must fail."""

from __future__ import annotations

import time
from typing import Any

from tests.guarantees.server_process import Refused
from tests.guarantees.writers import EQUAL, ApiWriter, Work

KEYS = 400

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


class Client(ApiWriter):
    """Writes to tables with triggers, cascades and every kind of key."""

    pause = 0.0

    def __init__(self, *args: Any, ddl: bool) -> None:
        super().__init__(*args)
        self.added, self.side = 0, list[str]()
        self.works: list[tuple[int, Work]] = [
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

    def key(self) -> int:
        return self.random.randrange(KEYS)

    def row(self, mark: str) -> dict[str, Any]:
        return {"id": self.random.randrange(KEYS, 10**9), "balance": self.key(), "mark": mark}

    def insert(self, mark: str) -> int:
        rows = [self.row(mark) for _ in range(self.random.choice((1, 1, 2, 5)))]
        return self.data("insert", into={"table": "account"}, rows=rows)

    def update(self, mark: str) -> int:
        values = {"balance": self.key(), "mark": mark}
        return 2 * self.data("update", table={"table": "account"}, where=EQUAL, args=[self.key()], set=values)

    def delete(self, mark: str) -> int:
        self.data("delete", table={"table": "account"}, where=EQUAL, args=[self.key()])
        return 0

    def bad_row_three(self, mark: str) -> int:
        rows = [self.row(mark), self.row(mark)]
        self.data("insert", into={"table": "account"}, rows=[*rows, rows[0]])
        return self.must_fail(mark, 3, "a duplicate key")

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
        return self.must_fail(mark, 2, "a duplicate key")

    def orphan(self, mark: str) -> int:
        self.sql("INSERT INTO child(id, mark, parent) VALUES (NULL, ?, -1)", mark)
        return self.must_fail(mark, 1, "a child without a parent")

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

    def schema(self, mark: str) -> int:
        if self.side and self.random.random() < 0.6:
            self.ask("schema.drop_table", table=self.side.pop())
            return 0
        if self.added < 4 and self.random.random() < 0.5:
            self.added += 1
            table = self.random.choice(("account", "note", "ledger"))
            self.sql(f"ALTER TABLE {table} ADD COLUMN {self.name}_{self.count}")
            return 0
        name = f"side_{self.name}_{self.count}"
        self.sql(f"CREATE TABLE {name}(id INTEGER PRIMARY KEY, mark TEXT)")
        self.side.append(name)
        return self.sql(f"INSERT INTO {name}(mark) VALUES (?), (?)", mark, mark)
