"""The nemesis of feeds: readers on every transport at once, writers, pests, and a server that is killed, ended,

made to forget and given an older file. Afterwards each reader is judged by its journal against the truth.
`random.Random(seed)` decides everything that can be decided; how threads and processes interleave cannot.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import apsw
from clients import History
from feed_journal import CHANGE
from feed_pests import Pests
from feed_reader import GIVE_UP, Reader
from feed_readers import KINDS
from feed_specs import specs
from feed_truth import Base, Expected, Spec, Truth
from feed_validators import validate
from feed_writers import SCHEMA, FeedWriter
from server_process import Asking, ServerProcess

from headwater.errors import OffsetExpired
from headwater.log.disk import DiskLog
from headwater.model.change import Transaction
from headwater.model.clock import parse_ts

WRITERS = 3
SETTINGS = """
[log]
flush_ms = 20
retention_events = {retention}
[feeds]
checkpoint_seconds = 0.3
[sqlite]
trim_rows = {trim}
trim_seconds = 0.2
"""
SHORT = 500  # changes that a log keeps which forgets
KEYED = {"item": ("id",), "pair": ("a", "b"), "line": ("rowid",), "ledger": ("mark",)}


class Recorder(threading.Thread):
    """Reads the log's file as another process would, fast enough that nothing is forgotten before."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.parts: list[Transaction] = []
        self.bases: list[Base] = []
        self.read_at = time.monotonic()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.failure = ""

    def run(self) -> None:
        while not self._over.wait(0.03):
            self.read()

    def stop(self) -> None:
        self._over.set()
        self.join()
        self.read()

    def read(self) -> None:
        """Take in what is new."""
        with self._lock, contextlib.closing(DiskLog.open(self.path, read_only=True)) as log:
            after = self.parts[-1].upto if self.parts else 0
            after = max(after, log.generation_first - 1)
            try:
                self.parts += list(log.scan(after=min(after, log.latest)))
                self.read_at = time.monotonic()
            except OffsetExpired as error:
                self.failure = f"the recorder of the truth was too slow: {error.message}"

    def generation(self) -> int:
        """Where the newest one begins."""
        with contextlib.closing(DiskLog.open(self.path, read_only=True)) as log:
            return log.generation_first

    def may_write(self) -> None:
        """Hold a writer back while reading is behind."""
        while time.monotonic() - self.read_at > 0.15 and not self._over.is_set() and not self.failure:
            time.sleep(0.01)


class FeedNemesis:
    """One run."""

    def __init__(self, seed: str, folder: Path, *, rounds: int = 4, readers: int = 12) -> None:
        self.seed, self.folder, self.rounds = seed, folder, rounds
        self.random = random.Random(seed)
        self._trim = self.random.choice((50, 10_000))
        self._retention = '"none"'
        self.server = ServerProcess(folder / "data", self._settings())
        self.history = History()
        self.recorder = Recorder(folder / "data" / "main.log.db")
        self.pests = Pests(self.server, random.Random(f"{seed}-pests"))
        self.readers = [self._reader(place, spec) for place, spec in enumerate(specs(self.random, readers))]
        self.events: list[str] = []
        self._stop = threading.Event()
        self._foreigner: subprocess.Popen[str] | None = None
        self._foreigners = 0

    def _settings(self) -> str:
        return SETTINGS.format(retention=self._retention, trim=self._trim)

    def _reader(self, place: int, spec: Spec) -> Reader:
        return KINDS[spec.transport](self.server, spec, random.Random(f"{self.seed}-reader-{place}"), f"r{place}")

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
        writers = [threading.Thread(target=self._writer(n).run, args=(self._stop,)) for n in range(WRITERS)]
        readers = [threading.Thread(target=reader.run, name=reader.name) for reader in self.readers]
        self.recorder.start()
        for thread in (*writers, *readers):
            thread.start()
        self.pests.start()
        self._begin_foreigner()
        try:
            for event in self._events():
                time.sleep(1 + self.random.random() * 1.5)
                self.events.append(event)
                getattr(self, "_" + event.replace(" ", "_"))()
            time.sleep(1)
        finally:
            self._end_foreigner()
            self._stop.set()
            self.pests.stop()
            for thread in writers:
                thread.join()
            self._finish(readers)
        self.server.stop()
        self.recorder.read()
        self._judge()

    def _prepare(self) -> None:
        self.server.start()
        ask = Asking(self.server)
        for statement in SCHEMA:
            ask("sql.exec", sql=statement)
        ask.close()

    def _writer(self, n: int) -> FeedWriter:
        dice = random.Random(f"{self.seed}-writer-{n}")
        return FeedWriter(Asking(self.server), self.history, dice, f"w{n}", self.recorder.may_write, ddl=n == 0)

    def _finish(self, readers: list[threading.Thread]) -> None:
        """One last change; then everybody reads to the end."""
        try:
            ask = Asking(self.server)
            ask("sql.exec", sql="INSERT INTO ledger(mark, n) VALUES ('last', 0)")
            self.server.wait_caught_up()
            goal = int(ask("stats.snapshot")["cdc"]["latest_offset"])
            ask.close()
        except BaseException:
            goal = GIVE_UP
            raise
        finally:
            for reader in self.readers:
                reader.finish(goal)
            end = time.monotonic() + 25
            for thread in readers:
                thread.join(max(end - time.monotonic(), 0.1))
            for reader, thread in zip(self.readers, readers, strict=True):
                if thread.is_alive():
                    reader.defects.append(f"did not reach {goal}: it is at {reader.last}, {reader.pressure}")
                    reader.finish(GIVE_UP)
                    thread.join()
            self.recorder.stop()

    # --- the foreign writer --------------------------------------------------------------------------------------

    def _begin_foreigner(self) -> None:
        self._foreigners += 1
        name, script = f"f{self._foreigners}", Path(__file__).with_name("feed_foreign.py")
        database = self.folder / "data" / "main.db"
        with (self.folder / f"{name}.txt").open("wb") as told:
            self._foreigner = subprocess.Popen(
                [sys.executable, str(script), str(database), f"{self.seed}-{name}", name, "rows"],
                stdin=subprocess.PIPE,
                stdout=told,
                text=True,
            )

    def _end_foreigner(self) -> None:
        process, self._foreigner = self._foreigner, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)

    def _told_by_foreigners(self) -> None:
        for path in self.folder.glob("f*.txt"):
            for line in path.read_text().splitlines():
                word, mark, _ = line.split(" ", 2)
                self.history.saw("foreign " + word)
                if word == "refused":
                    self.history.refuse(mark)

    # --- trouble -------------------------------------------------------------------------------------------------

    def _events(self) -> list[str]:
        """Always a kill and an end; and either the log forgets, or the file is restored."""
        found = ["kill", "end", self.random.choice(("forget", "restore"))]
        while len(found) < self.rounds:
            found.append(self.random.choice(("kill", "kill twice", "end", "calm")))
        self.random.shuffle(found)
        return found

    def _calm(self) -> None:
        time.sleep(1)

    def _kill(self) -> None:
        self.server.kill()
        self.server.start()

    def _kill_twice(self) -> None:
        self.server.kill()
        self.server.launch()
        time.sleep(self.random.random() * 0.8)
        self.server.kill()
        self.server.start()

    def _end(self) -> None:
        self.server.stop()
        self.server.start()

    def _forget(self) -> None:
        """From here on the log is short."""
        self.server.stop()
        self.recorder.read()
        self._retention = str(SHORT)
        (self.folder / "data" / "headwater.toml").write_text(self._settings())
        self.server.start()

    def _restore(self) -> None:
        """The database as it was a while ago: the log goes on in another generation."""
        data, copy = self.folder / "data", self.folder / "copy.db"
        self._copy(data / "main.db", copy)
        time.sleep(0.7)
        self._end_foreigner()
        self.server.stop()
        self.recorder.read()
        for path in data.glob("main.db*"):
            path.unlink()
        shutil.copy(copy, data / "main.db")
        rows = read_rows(copy)
        self.server.start()
        self.recorder.bases.append(Base(self.recorder.generation() - 1, rows))
        self._begin_foreigner()

    def _copy(self, path: Path, copy: Path) -> None:
        with contextlib.closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)) as db:
            db.set_busy_timeout(10_000)
            db.execute("VACUUM INTO ?", (str(copy),))
        with contextlib.closing(apsw.Connection(str(copy))) as db:
            db.execute("PRAGMA journal_mode = WAL").fetchall()

    # --- judgement -----------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        self._told_by_foreigners()
        truth = Truth(self.recorder.parts, self.recorder.bases)
        for entry in (entry for reader in self.readers for entry in reader.journal if entry.kind == CHANGE):
            truth.note_told(entry.offset, parse_ts(entry.body["ts"]))
        failures = [self.recorder.failure] if self.recorder.failure else []
        failures += self.history.defects[:10] + self._judge_tables(truth)
        if "Traceback" in (said := (self.folder / "data" / "server.err").read_text(errors="replace")):
            failures.append("the server met what it did not expect: " + said[said.index("Traceback") :][:2000])
        for reader in self.readers:
            found = self._judge_reader(reader, truth)
            if found:
                failures.append(f"{reader.name} {reader.spec} losses {reader.losses}:\n  " + "\n  ".join(found[:12]))
        assert not failures, "\n".join(failures)
        losses = sum(len(reader.losses) for reader in self.readers)
        entries = sum(len(reader.journal) for reader in self.readers)
        print(f"seed {self.seed}: {truth.latest} changes, {entries} entries, {losses} losses; {self.events}")
        print(f"  {dict(self.history.codes)}; {self.pests.told()}")
        assert self.history.codes["ok"] > 100 and entries > 1000, "too little happened"

    def _judge_tables(self, truth: Truth) -> list[str]:
        """The truth itself: the transactions give the tables of the file."""
        state = truth.whole("objects_json").state(truth.latest)
        base = Base(truth.latest, read_rows(self.folder / "data" / "main.db"))
        wanted = Expected(Truth([], [*truth.bases, base]), Spec(), tables=truth.whole("objects_json").tables)
        mine = {key: str(image) for key, image in state.items()}
        theirs = {key: str(image) for key, image in wanted.state(truth.latest).items()}
        odd = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
        return [f"the log does not give the tables: {len(odd)} rows differ, {odd[:3]}"] if odd else []

    def _judge_reader(self, reader: Reader, truth: Truth) -> list[str]:
        spec, defects = reader.spec, reader.defects[:5]
        streams = spec.transport not in ("poll", "long_poll")
        expected = Expected(truth, spec)
        refused = self.history.refused | {"never"}
        return defects + validate(reader.journal, expected, refused, reader.goal, streams=streams)


def read_rows(path: Path) -> dict[str, list]:  # type: ignore[type-arg]
    """Every table of a file: keys and rows, by APSW; nobody else has the file open."""
    found = {}
    with contextlib.closing(apsw.Connection(str(path))) as db:
        for table, key in KEYED.items():
            names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            more = ["rowid"] if key == ("rowid",) else []
            rows = [dict(zip(names + more, row, strict=True)) for row in db.execute(
                f"SELECT {', '.join(names + more)} FROM {table}"
            )]  # fmt: skip
            found[table] = [(tuple(row[name] for name in key), row) for row in rows]
    return found
