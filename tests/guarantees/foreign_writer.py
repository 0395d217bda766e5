"""Runs as a process of its own: writes into the database file with the standard library's SQLite.

    python foreign_writer.py PATH SEED NAME DDL

Says `acknowledged MARK CHANGES` after a COMMIT and `refused MARK` after a rollback, each a line on stdout.
Ends at the end of stdin.
"""

from __future__ import annotations

import random
import select
import sqlite3
import sys


class Writer:
    """One connection and its marks."""

    def __init__(self, path: str, seed: str, name: str, ddl: bool) -> None:
        self.random = random.Random(seed)
        self.name, self.ddl = name, ddl
        self.count = self.made = 0
        self.db = sqlite3.connect(path, isolation_level=None, timeout=30)
        self.db.execute("PRAGMA synchronous = NORMAL")  # as many applications do

    def step(self) -> None:
        """One transaction, by the dice."""
        self.count += 1
        mark = f"{self.name}-{self.count}"
        works = [self.small] * 12 + [self.replace] * 4 + [self.bulk] + [self.moved] * 2
        works += [self.schema] if self.ddl else []
        work = self.random.choice(works)
        ending = "ROLLBACK" if self.random.random() < 0.2 else "COMMIT"
        try:
            self.db.execute("BEGIN IMMEDIATE")
            changes = work(mark)
            self.db.execute(ending)
        except sqlite3.Error as error:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            tell("refused", mark, str(error).replace("\n", " "))
        else:
            tell(*(("acknowledged", mark, changes) if ending == "COMMIT" else ("refused", mark, "rolled back")))

    def key(self) -> int:
        return self.random.randrange(400)

    def small(self, mark: str) -> int:
        self.db.execute("INSERT INTO ledger(mark, n) VALUES (?, ?)", (mark, self.count))
        changed = self.db.execute("UPDATE account SET balance = balance + 1, mark = ? WHERE id = ?", (mark, self.key()))
        self.db.execute("DELETE FROM account WHERE id = ?", (self.key(),))
        return 1 + self.left(mark) if changed else 1

    def left(self, mark: str) -> int:
        """How many account rows carry the mark: an update whose row the same transaction deleted still counts."""
        return self._counted(mark)

    def _counted(self, mark: str) -> int:
        raise NotImplementedError

    def replace(self, mark: str) -> int:
        self.db.execute("INSERT OR REPLACE INTO account(id, balance, mark) VALUES (?, 0, ?)", (self.key(), mark))
        return 1
