"""SQLite under a nemesis: a file that our server and another process write; with readers, or for the log alone."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import apsw
from tests.guarantees import clients, feed_writers
from tests.guarantees.feed_oracle import Base, Truth
from tests.guarantees.fold import RawRow, raw_row
from tests.guarantees.nemesis_database import Rows, Run, World
from tests.guarantees.server_process import Asking
from tests.guarantees.validators import CompleteInTheLog, Durable, placed
from tests.guarantees.writers import History

from headwater.model.change import Transaction
from headwater.model.table import Table
from headwater.sources.sqlite.capture.trigger_installation import UNDONE

ROOT = Path(__file__).parents[2]
KEYED = {"item": ("id",), "pair": ("a", "b"), "line": ("rowid",), "ledger": ("mark",)}


class Foreigner:
    """Runs the writer `module` on the file in another process; call `end` before the next `begin`."""

    def __init__(self, folder: Path, database: Path, seed: str, module: str, works: str) -> None:
        self._folder, self._database, self._seed = folder, database, seed
        self._module, self._works = f"{__package__}.{module}", works
        self._count = 0
        self._process: subprocess.Popen[str] | None = None

    def begin(self) -> None:
        self._count += 1
        name = f"f{self._count}"
        command = [sys.executable, "-m", self._module, str(self._database), f"{self._seed}-{name}", name, self._works]
        with (self._folder / f"{name}.txt").open("wb") as told:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=told, text=True, cwd=ROOT)

    def end(self, *, killed: bool = False) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            if killed:
                process.kill()
            process.stdin.close()
            code = process.wait(60)
            assert killed or code == 0, f"the other process ended with {code}"

    def record_answers(self, history: History) -> None:
        """Add to the history the answers that all these processes received."""
        for path in self._folder.glob("f*.txt"):
            for line in path.read_text().splitlines():
                word, mark, rest = line.split(" ", 2)
                history.saw("foreign " + word)
                if word == "refused":
                    history.refuse(mark)
                else:
                    history.acknowledge(mark, int(rest))


class SqliteWorld(World):
    """The shared part of both SQLite worlds."""

    schema: tuple[str, ...]
    module, works = "feed_foreign_writer", "rows"

    def __init__(self, seed: str, folder: Path) -> None:
        self._trim = random.Random(seed).choice(("50", "10000"))
        super().__init__(seed, folder)
        self.foreigner = Foreigner(folder, self.data / "main.db", seed, self.module, self.works)

    def configured(self) -> str:
        return super().configured().replace("{trim}", self._trim)

    def prepare(self) -> None:
        self.server.start()
        ask = Asking(self.server)
        for statement in self.schema:
            ask("sql.exec", sql=statement)
        ask.close()

    def dice(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}-{name}")

    def begin(self) -> None:
        self.foreigner.begin()

    def leave(self) -> None:
        self.foreigner.end()
        self.foreigner.record_answers(self.history)

    def happen(self, event: str) -> None:
        """Cause one event; end the foreign writer meanwhile if the log is short."""
        is_held = self.is_short and event != "kill the foreigner"
        if is_held:
            self.foreigner.end()
        super().happen(event)
        if is_held:
            self.foreigner.begin()

    def judge(self, parts: list[Transaction], truth: Truth | None) -> list[str]:
        """Check that the foreign process wrote enough."""
        return [] if self.history.codes["foreign acknowledged"] > 20 else ["too little happened in the other process"]

    def do_kill_the_foreigner(self) -> None:
        self.foreigner.end(killed=True)
        self.foreigner.begin()


class SqliteFeeds(SqliteWorld):
    """Small transactions, and readers; the log may become short, and the file may be restored from a copy."""

    must = ("kill", "end")
    may = (*World.may, "forget", "restore", "kill the foreigner")
    settings = """
[log]
flush_ms = 20
retention_events = {retention}
[feeds]
checkpoint_seconds = 0.3
[sqlite]
trim_rows = {trim}
trim_seconds = 0.2
"""
    readers = 11
    schema = feed_writers.SCHEMA

    def events(self, rounds: int) -> list[str]:
        """Return events with exactly one after which readers lose their position."""
        loss = self.random.choice(("forget", "restore"))
        self.may = tuple(event for event in self.may if event not in ("forget", "restore"))
        found = [*super().events(rounds - 1), loss]
        self.random.shuffle(found)
        return found

    def writers(self) -> list[Run]:
        return [
            feed_writers.FeedWriter(
                Asking(self.server),
                self.history,
                self.dice(f"writer-{n}"),
                f"w{n}",
                self.may_write,
                ddl=n == 0,
            ).run
            for n in range(3)
        ]

    def rows(self) -> Rows:
        return read_rows(self.data / "main.db")

    def do_restore(self) -> None:
        """Restore an earlier copy of the database: the log continues in a new generation."""
        self.may_lose, self.is_one_history = True, False
        copy = self.folder / "copy.db"
        _copy(self.data / "main.db", copy)
        time.sleep(0.7)
        self.foreigner.end()
        self.server.stop()
        self.recorder.read()
        for path in self.data.glob("main.db*"):
            path.unlink()
        shutil.copy(copy, self.data / "main.db")
        rows = read_rows(copy)
        self.server.start()
        self.bases.append(Base(self.recorder.generation() - 1, dict(rows)))
        self.foreigner.begin()


class SqliteLog(SqliteWorld):
    """Every kind of write and no readers; with `retained` the log is short and is checked backwards from the tables."""

    may = ("kill", "kill", "kill twice", "end", "pause", "fill", "kill the foreigner")
    settings = """
[log]
flush_ms = 20
retention_events = {retention}
[sqlite]
trim_rows = {trim}
trim_seconds = 0.2
tx_idle_seconds = 0.15
"""
    readers, watchers, pests = 0, 0, False
    quota, patience = (100, 500), 4.0
    schema = clients.SCHEMA
    module = "foreign_writer"

    def __init__(self, seed: str, folder: Path, *, retained: int | None = None) -> None:
        self.retained, self.keeps_all = retained, retained is None
        self.works = "schema" if retained is None else "rows"
        super().__init__(seed, folder)

    def configured(self) -> str:
        self.retention = '"none"' if self.retained is None else str(self.retained)
        return super().configured()

    def writers(self) -> list[Run]:
        ddl = self.retained is None
        return [
            clients.Client(Asking(self.server), self.history, self.dice(f"client-{n}"), f"c{n}", ddl=ddl and n == 0).run
            for n in range(4)
        ]

    def judge(self, parts: list[Transaction], truth: Truth | None) -> list[str]:
        """Check that the log folds to the tables, and that the append-only ledger has no refused row."""
        complete, lasting = CompleteInTheLog(), Durable()
        with Tables(self.data / "main.db") as tables:
            if self.retained is None:
                complete.check(placed(parts), tables.names(), tables.rows)
                told = {name for name in complete.unknown if name != "line" and not name.startswith("foreign_")}
                # Capture was away for so long that the foreigner made and dropped a table, or altered one repeatedly.
                told -= {c.table.name for part in parts for c in part.changes if c.ddl == UNDONE}
                if told:
                    complete.fail(f"a snapshot was asked for without a reason: {sorted(told)}")
            else:
                complete.check_backwards(placed(parts), tables.rows)
            for mark in tables.marks():
                lasting.note_found(mark)
        for mark in self.history.refused:
            lasting.note_refused(mark)
        lasting.check()
        return complete.failures + lasting.failures + super().judge(parts, truth)


class Tables:
    """The tables of a database, read by APSW: this process must never open the file with another copy of SQLite."""

    def __init__(self, path: Path) -> None:
        self._db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)

    def names(self) -> list[str]:
        sql = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE '\\_headwater\\_%' ESCAPE '\\'"
        return [name for (name,) in self._db.execute(sql + " AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'")]

    def rows(self, table: Table) -> list[RawRow]:
        columns = ", ".join(f'"{name}"' for name in table.names)
        return [raw_row(row) for row in self._db.execute(f'SELECT {columns} FROM "{table.name}"')]

    def marks(self) -> list[str]:
        return [mark for (mark,) in self._db.execute("SELECT mark FROM ledger")]

    def __enter__(self) -> Tables:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()


def _copy(path: Path, copy: Path) -> None:
    with contextlib.closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)) as db:
        db.set_busy_timeout(10_000)
        db.execute("VACUUM INTO ?", (str(copy),))
    with contextlib.closing(apsw.Connection(str(copy))) as db:
        db.execute("PRAGMA journal_mode = WAL").fetchall()


def read_rows(path: Path) -> Rows:
    """Return keys and rows of every table of a file; no other process may have it open."""
    found = {}
    with contextlib.closing(apsw.Connection(str(path))) as db:
        for table, key in KEYED.items():
            names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            names += ["rowid"] if key == ("rowid",) else []
            select = f"SELECT {', '.join(names)} FROM {table}"
            rows = [dict(zip(names, row, strict=True)) for row in db.execute(select)]
            found[table] = [(tuple(row[name] for name in key), row) for row in rows]
    return found
