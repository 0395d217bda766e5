"""The nemesis: a server under load that is killed, ended and paused at random, then judged by its files.

`random.Random(seed)` decides everything that can be decided; how threads and processes interleave cannot.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import apsw
from clients import SCHEMA, Client, History
from fold import RawRow, raw_row
from server_process import Asking, ServerProcess
from validators import Atomic, CompleteInTheLog, Durable, NeverRewritten, Ordered, Validator, placed

from headwater.errors import OffsetExpired
from headwater.log.disk import DiskLog
from headwater.model.change import Transaction
from headwater.model.table import Table

CLIENTS = 4
SETTINGS = """
[log]
flush_ms = 20
retention_events = {retention}
[sqlite]
trim_rows = {trim_rows}
trim_seconds = 0.2
tx_idle_seconds = 0.15
"""


class Nemesis:
    """One run. `retained` small makes the log forget: then it is judged backwards from the tables."""

    def __init__(self, seed: str, folder: Path, *, rounds: int = 5, retained: int | None = None) -> None:
        self.seed, self.rounds, self.retained = seed, rounds, retained
        self.random = random.Random(seed)
        self.folder = folder
        settings = SETTINGS.format(
            retention='"none"' if retained is None else retained, trim_rows=self.random.choice((50, 10_000))
        )
        self.server = ServerProcess(folder, settings)
        self.history = History()
        self.rewritten = NeverRewritten()
        self.generation = ""
        self.events: list[str] = []
        self._stop = threading.Event()
        self._foreigners = 0

    def run(self) -> None:
        """Load, trouble, judgement. A failure names the seed and what happened."""
        try:
            self._run()
        except BaseException as error:
            raise AssertionError(
                f"seed {self.seed!r} failed (repeat: SOAK_SEED={self.seed} SEEDS=1 make soak)\n"
                f"events: {', '.join(self.events)}\ncodes: {dict(self.history.codes)}\n{error}\n"
                f"server: {self.server.last_words()[-2000:]}"
            ) from error
        finally:
            self.server.close()

    def _run(self) -> None:
        self._prepare()
        threads = [threading.Thread(target=self._client(n).run, args=(self._stop,)) for n in range(CLIENTS)]
        for thread in threads:
            thread.start()
        foreigner = self._foreigner()
        try:
            for _ in range(self.rounds):
                self._let_them_write()
                foreigner = self._trouble(foreigner)
                self._read_the_log()
        finally:
            self._end(foreigner)
            self._stop.set()
            for thread in threads:
                thread.join()
        self._say_something()
        self.server.wait_caught_up()
        self.server.stop()
        self._judge()

    def _prepare(self) -> None:
        self.server.start()
        ask = Asking(self.server)
        for statement in SCHEMA:
            ask("sql.exec", sql=statement)
        ask.close()

    def _say_something(self) -> None:
        """A last change: whoever has seen it has also seen the schema that foreign DDL left behind."""
        ask = Asking(self.server)
        ask("sql.exec", sql="INSERT INTO ledger(mark, n) VALUES ('last', 0)")
        ask.close()

    def _client(self, n: int) -> Client:
        dice = random.Random(f"{self.seed}-client-{n}")
        ddl = n == 0 and self.retained is None
        return Client(Asking(self.server), self.history, dice, f"c{n}", ddl=ddl)

    # The foreign writer

    def _foreigner(self) -> subprocess.Popen[str]:
        self._foreigners += 1
        name = f"f{self._foreigners}"
        script = Path(__file__).with_name("foreign_writer.py")
        works = "schema" if self.retained is None else "rows"
        process = subprocess.Popen(
            [sys.executable, str(script), str(self.folder / "main.db"), f"{self.seed}-{name}", name, works],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        process.reading = threading.Thread(target=self._listen, args=(process,))  # type: ignore[attr-defined]
        process.reading.start()  # type: ignore[attr-defined]
        return process

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            word, mark, rest = line.rstrip("\n").split(" ", 2)
            if word == "acknowledged":
                self.history.acknowledge(mark, int(rest))
            else:
                self.history.refuse(mark)
            self.history.saw("foreign " + word)

    def _end(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.wait(60)
        process.reading.join()  # type: ignore[attr-defined]
        process.stdout.close()

    # Trouble

    def _let_them_write(self) -> None:
        """Until so many more writes are acknowledged; a few seconds at most."""
        wanted = len(self.history) + self.random.randrange(100, 800)
        end = time.monotonic() + 4
        while len(self.history) < wanted and time.monotonic() < end:
            time.sleep(0.01)

    def _trouble(self, foreigner: subprocess.Popen[str]) -> subprocess.Popen[str]:
        event = self.random.choice(("kill", "kill", "kill twice", "end", "pause", "kill the foreigner"))
        self.events.append(event)
        match event:
            case "kill":
                self.server.kill()
                self._read_the_log()
                self.server.start()
            case "kill twice":
                self.server.kill()
                self.server.launch()
                time.sleep(self.random.random() * 0.8)  # a random point of the way up
                self.server.kill()
                self.server.start()
            case "end":
                self.server.stop()
                self.server.start()
            case "pause":
                self.server.signal(signal.SIGSTOP)
                time.sleep(0.4)
                self.server.signal(signal.SIGCONT)
            case _:
                foreigner.kill()
                self._end(foreigner)
                return self._foreigner()
        return foreigner

    # Judgement

    def _read_the_log(self) -> list[Transaction]:
        """What another process reads from the log right now."""
        log = DiskLog.open(self.folder / "main.log.db", read_only=True)
        try:
            self.generation = self.generation or log.generation
            assert log.generation == self.generation, f"a needless new generation: {log.generation_reason}"
            found = self._scan(log)
        finally:
            log.close()
        self.rewritten.note_reading(placed(found))
        return found

    def _scan(self, log: DiskLog) -> list[Transaction]:
        """All that is kept; once more if retention overtook us on the way, as it says it may."""
        while True:
            try:
                return list(log.scan(after=log.horizon - 1))
            except OffsetExpired:
                assert self.retained is not None, "nothing may expire without retention"

    def _judge(self) -> None:
        parts = self._read_the_log()
        validators = [self.rewritten, *self._judge_log(parts), *self._judge_tables(parts)]
        failures = [text for validator in validators for text in validator.failures] + self.history.defects[:10]
        assert not failures, "\n".join(failures)
        print(f"seed {self.seed}: {len(placed(parts))} changes; {self.events}; {dict(self.history.codes)}")
        assert self.history.codes["ok"] > 100 and self.history.codes["foreign acknowledged"] > 20, "too little happened"

    def _judge_log(self, parts: list[Transaction]) -> list[Validator]:
        changes, durable, atomic, ordered = placed(parts), Durable(), Atomic(), Ordered()
        ordered.check(changes, first=1 if self.retained is None else None)
        atomic.check_parts(parts)
        oldest = {each.mark for each in changes[:1]}  # retention may have cut into this one
        for mark, size in self.history.acknowledged.items():
            if mark not in oldest:
                atomic.note_size(mark, size)
        atomic.check(changes)
        if self.retained is None:
            self._judge_durable(durable, [each.mark for each in changes if each.mark is not None])
        return [ordered, atomic, durable]

    def _judge_durable(self, durable: Durable, marks: list[str]) -> None:
        for mark, size in self.history.acknowledged.items():
            durable.note_acknowledged(mark, size)
        for mark in self.history.refused:
            durable.note_refused(mark)
        for mark in marks:
            durable.note_found(mark)
        durable.check()

    def _judge_tables(self, parts: list[Transaction]) -> list[Validator]:
        complete, lasting = CompleteInTheLog(), Durable()
        with Tables(self.folder / "main.db") as tables:
            if self.retained is None:
                complete.check(placed(parts), tables.names(), tables.rows)
                told = {name for name in complete.unknown if name != "line" and not name.startswith("foreign_")}
                if told:
                    complete.fail(f"a snapshot was asked for without a reason: {sorted(told)}")
            else:
                complete.check_backwards(placed(parts), tables.rows)
            self._judge_ledger(lasting, tables.marks())
        return [complete, lasting]

    def _judge_ledger(self, lasting: Durable, marks: list[str]) -> None:
        """The ledger is only ever added to: what was refused may not be in it."""
        for mark in self.history.refused:
            lasting.note_refused(mark)
        for mark in marks:
            lasting.note_found(mark)
        lasting.check()


class Tables:
    """The database as it stands, by APSW: this process never opens it with another copy of SQLite."""

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
