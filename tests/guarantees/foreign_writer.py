"""Runs as a process of its own: writes into the database file with the standard library's SQLite.

    python -m tests.guarantees.foreign_writer PATH SEED NAME schema|rows

Says `acknowledged MARK CHANGES` after a COMMIT and `refused MARK WHY` after a rollback, each a line on
stdout. Ends at the end of stdin.
"""

from __future__ import annotations

import os
import random
import select
import sqlite3
import sys
import time
from typing import Any

KEYS = 400
OLD_SECONDS = 5.0  # age of a table that is dropped: capture has seen it by then, unless the server was away


class Writer:
    """One connection; every row that it leaves carries the mark of its transaction."""

    def __init__(self, path: str, seed: str, name: str, works: str) -> None:
        self.random = random.Random(seed)
        self.name, self.count, self.changes = name, 0, 0
        self.side: list[tuple[str, float]] = []  # tables, and when each was created
        self.db = sqlite3.connect(path, isolation_level=None, timeout=30)
        self.db.execute("PRAGMA synchronous = NORMAL")  # as many applications do
        self.works = [self.small] * 12 + [self.replace] * 5 + [self.notes] * 5 + [self.bulk] + [self.delete]
        self.works += [self.schema] * 2 if works == "schema" else []

    def step(self) -> None:
        """Run one random transaction."""
        self.count += 1
        self.changes = 0
        mark = f"{self.name}-{self.count}"
        work = self.random.choice(self.works)
        committed = self.random.random() < 0.8
        try:
            self.db.execute("BEGIN IMMEDIATE")
            work(mark)
            self.db.execute("COMMIT" if committed else "ROLLBACK")
        except sqlite3.Error as error:
            committed = False
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            print_line("refused", mark, str(error))
        else:
            print_line("acknowledged", mark, self.changes) if committed else print_line("refused", mark, "rolled back")

    def mark(self, sql: str, *args: Any, each: int = 1) -> None:
        """Run a statement whose every row counts as `each` changes with the mark."""
        self.db.execute(sql, args)
        self.changes += self.db.execute("SELECT changes()").fetchone()[0] * each  # rowcount is -1 after WITH

    def key(self) -> int:
        return self.random.randrange(KEYS)

    def small(self, mark: str) -> None:
        self.mark("INSERT INTO ledger(mark, n) VALUES (?, ?)", mark, self.count)
        self.mark("UPDATE account SET balance = balance + 1, mark = ? WHERE id = ?", mark, self.key(), each=2)
        self.db.execute("SAVEPOINT s")
        self.db.execute("UPDATE account SET balance = -1, mark = 'never' WHERE id < 50")
        self.db.execute("ROLLBACK TO s")
        self.db.execute("DELETE FROM account WHERE id = ?", (self.key(),))

    def replace(self, mark: str) -> None:
        self.mark("INSERT OR REPLACE INTO account(id, balance, mark) VALUES (?, 0, ?)", self.key(), mark)

    def notes(self, mark: str) -> None:
        text, unique = f"k{self.key() % 40}", self.key() % 40
        self.mark("INSERT OR REPLACE INTO note(k, u, v, mark) VALUES (?, ?, x'00ff', ?)", text, unique, mark)
        self.mark("UPDATE OR REPLACE note SET u = u + 1, mark = ? WHERE k = ?", mark, f"k{self.key() % 40}")

    def bulk(self, mark: str) -> None:
        rows = self.random.choice((50, 600, 5000))
        numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})"
        self.mark(f"{numbers} INSERT INTO line(x, mark) SELECT i * 0.5, ? FROM n", mark)

    def delete(self, mark: str) -> None:
        self.db.execute("DELETE FROM line")
        self.mark("INSERT INTO ledger(mark, n) VALUES (?, NULL)", mark)

    def schema(self, mark: str) -> None:
        # A table that is made and dropped between two looks of capture is a reason to ask for snapshots.
        if self.side and time.monotonic() - self.side[0][1] > OLD_SECONDS:
            self.db.execute(f"DROP TABLE {self.side.pop(0)[0]}")
            return
        if self.random.random() < 0.3:
            self.db.execute(f"ALTER TABLE line ADD COLUMN {self.name}_{self.count}")
            return
        name = f"foreign_{self.name}_{self.count}"
        self.db.execute(f"CREATE TABLE {name}(id INTEGER PRIMARY KEY, v)")
        self.db.execute(f"INSERT INTO {name} VALUES (1, 'unseen: our triggers are not there yet')")
        self.side.append((name, time.monotonic()))


def print_line(*words: object) -> None:
    """Write one line for the test in a single system call: a kill may come between two."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


if __name__ == "__main__":
    writer = Writer(*sys.argv[1:5])
    while not select.select([sys.stdin], [], [], writer.random.random() * 0.03)[0]:
        writer.step()
