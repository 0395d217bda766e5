"""The nemesis of PostgreSQL: our server over a cluster of its own, writers of every kind, readers on every transport.

Both servers are killed, ended, paused and cut off from each other at random. Afterwards the log is judged by the tables
and by what writers were told, and every reader by its journal against the log, with the validators of feeds.
`random.Random(seed)` decides everything that can be decided; how threads and processes interleave cannot.
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
from feed_journal import BEGIN, CHANGE, REACHED, Entry
from feed_nemesis import Recorder
from feed_reader import GIVE_UP, Reader
from feed_readers import KINDS
from feed_specs import specs
from feed_truth import Base, Expected, Spec, Truth
from feed_validators import validate
from pg_writers import SCHEMA, ApiWriter, PgHistory, PgWriter, Session
from server_process import Asking, Gone, Refused, ServerProcess
from tests.sources.postgres.pg_server import Server
from validators import Answered, Atomic, Constant, Durable, NeverRewritten, Ordered, Validator, placed

from headwater.model.clock import parse_ts

FOREIGNERS, CLIENTS = 3, 2
TABLES = ("item", "pair", "account", "ledger", "line", "large")  # of one shape for the whole run
SETTINGS = """
[log]
flush_ms = 20
retention_events = "none"
[feeds]
checkpoint_seconds = 0.3
[postgres]
heartbeat_seconds = 0.5
"""
RUN = {"max_prepared_transactions": "50", "wal_sender_timeout": "10s", "max_connections": "60"}
# Only what SQLite, which is asked for the truth, and PostgreSQL mean alike; on tables whose old rows are known.
WHERES = (
    ("item", "n > 30"),
    ("item", "name = 'Ann' OR price IS NULL"),
    ("item", "n BETWEEN 10 AND 40 AND name <> ''"),
    ("item", "coalesce(price, 1) * 2 > 0.5"),
    ("item", "length(name) > 2 AND id % 2 = 0"),
    ("pair", "v > 'b'"),
    ("pair", "b IN (1, 3)"),
    ("account", "balance < 90"),
)


class PgNemesis:
    """One run."""

    def __init__(self, seed: str, folder: Path, programs: Path, *, rounds: int = 5, readers: int = 9) -> None:
        self.seed, self.folder, self.rounds = seed, folder, rounds
        self.random = random.Random(seed)
        self.postgres = Server(programs, **RUN)
        url = f"main=postgresql://postgres@/app?host={self.postgres.folder}"
        self.server = ServerProcess(folder / "data", SETTINGS, databases=[url])
        self.history = PgHistory()
        self.recorder = Recorder(folder / "data" / "main.log.db")
        self.rewritten = NeverRewritten()
        chosen = map(_fit, specs(self.random, readers, WHERES))
        self.readers = [self._reader(place, spec) for place, spec in enumerate(chosen)]
        self.events: list[str] = []
        self.base: Base | None = None
        self._stop = threading.Event()

    def _reader(self, place: int, spec: Spec) -> Reader:
        found = KINDS[spec.transport](self.server, spec, random.Random(f"{self.seed}-reader-{place}"), f"r{place}")
        found.trusts_time = False  # rows may be ahead of a log that has not taken them in
        return found

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
            self.postgres.stop()

    def _run(self) -> None:
        self._prepare()
        works: list[PgWriter | ApiWriter] = [self._foreigner(n) for n in range(FOREIGNERS)]
        works += [self._client(n) for n in range(CLIENTS)]
        writers = [threading.Thread(target=each.run, args=(self._stop,), name=each.name) for each in works]
        readers = [threading.Thread(target=reader.run, name=reader.name) for reader in self.readers]
        self.recorder.start()
        for thread in (*writers, *readers):
            thread.start()
        try:
            for event in self._events():
                self._let_them_write()
                self.events.append(event)
                getattr(self, "_" + event.replace(" ", "_"))()
                self.rewritten.note_reading(placed(self.recorder.parts))
            time.sleep(1)
        finally:
            self._stop.set()
            for thread in writers:
                thread.join()
            self._finish(readers)
        rows = self._rows()
        self.server.stop()
        self.recorder.read()
        self._judge(rows)

    def _let_them_write(self) -> None:
        """Until so many more writes of our clients are acknowledged; some seconds at most."""
        time.sleep(0.3 + self.random.random())
        wanted, end = self.history.codes["ok"] + 15, time.monotonic() + 10
        while self.history.codes["ok"] < wanted and time.monotonic() < end:
            time.sleep(0.02)

    def _prepare(self) -> None:
        with self.postgres.connect() as admin:
            admin.execute("CREATE DATABASE app")
        with self.postgres.connect("app") as db:
            for statement in SCHEMA:
                db.execute(statement.encode())
        self.base = Base(0, self._rows())
        self.server.start()

    def _foreigner(self, n: int) -> PgWriter:
        dice = random.Random(f"{self.seed}-foreigner-{n}")
        return PgWriter(self._connect, self.history, dice, f"f{n}", ddl=n == 0)

    def _client(self, n: int) -> ApiWriter:
        return ApiWriter(Asking(self.server), self.history, random.Random(f"{self.seed}-client-{n}"), f"c{n}")

    def _connect(self, options: str = "") -> Session:
        address = f"host={self.postgres.folder} user=postgres dbname=app options='{options}' connect_timeout=5"
        return psycopg.connect(address, autocommit=True)

    def _finish(self, readers: list[threading.Thread]) -> None:
        """One last change; then everybody reads to the end."""
        goal = GIVE_UP
        try:
            with self._connect() as db:
                db.execute("INSERT INTO ledger VALUES ('last', 0)")
            goal = self._goal()
        finally:
            for reader in self.readers:
                reader.finish(goal)
            end = time.monotonic() + 60
            for reader, thread in zip(self.readers, readers, strict=True):
                thread.join(max(end - time.monotonic(), 0.1))
                if thread.is_alive():
                    reader.defects.append(f"did not reach {goal}: it is at {reader.last}, {reader.pressure}")
                    reader.finish(GIVE_UP)
                    thread.join()
            self.recorder.stop()

    def _goal(self) -> int:
        """The newest offset, once the log holds the last change."""
        ask, end = Asking(self.server), time.monotonic() + 60
        try:
            while True:
                with contextlib.suppress(Gone, Refused):
                    found = ask("stats.snapshot")
                    state = found["databases"]["main"]
                    if state["lag_changes"] == 0 and not state.get("error") and self._has_last():
                        return int(found["cdc"]["latest_offset"])
                assert time.monotonic() < end, "the log does not catch up"
                time.sleep(0.05)  # asking again at once would only keep it from working
        finally:
            ask.close()

    def _has_last(self) -> bool:
        self.recorder.read()
        tail = (change for part in self.recorder.parts[-50:] for change in part.changes)
        return any(change.after is not None and "last" in change.after[:1] for change in tail)

    # --- trouble -------------------------------------------------------------------------------------------------

    def _events(self) -> list[str]:
        """Always a kill of each and a cut between them."""
        found = ["kill", "crash", "cut"]
        more = ("kill", "kill twice", "end", "pause", "crash", "restart", "cut", "pause postgres", "crash both", "calm")
        found += [self.random.choice(more) for _ in range(self.rounds - len(found))]
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
        time.sleep(self.random.random() * 1.5)  # a random point of the way up
        self.server.kill()
        self.server.start()

    def _end(self) -> None:
        self.server.stop()
        self.server.start()

    def _pause(self) -> None:
        self.server.signal(signal.SIGSTOP)
        time.sleep(1)
        self.server.signal(signal.SIGCONT)

    def _crash(self) -> None:
        self.postgres.crash()
        time.sleep(self.random.random())
        self.postgres.start()

    def _crash_both(self) -> None:
        self.postgres.crash()
        self.server.kill()
        self.postgres.start()
        self.server.start()

    def _restart(self) -> None:
        """In good order: it waits until its log is sent."""
        self.postgres.kill(signal.SIGINT)
        self.postgres.start()

    def _pause_postgres(self) -> None:
        self.postgres.signal(signal.SIGSTOP)
        time.sleep(1)
        self.postgres.signal(signal.SIGCONT)

    def _cut(self) -> None:
        """Often while something is on its way."""
        for _ in range(3):
            with contextlib.suppress(psycopg.Error), self._connect() as db:
                db.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
            time.sleep(self.random.random() * 0.3)

    # --- judgement -----------------------------------------------------------------------------------------------

    def _rows(self) -> dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
        """Every table of one shape: keys and rows."""
        found = {}
        with self._connect() as db:
            for table in TABLES:
                cursor = db.execute(f"SELECT * FROM {table}".encode())
                names = [column.name for column in cursor.description or ()]
                key = ("a", "b") if table == "pair" else tuple(names[:1])
                rows = [dict(zip(names, row, strict=True)) for row in cursor]
                found[table] = [(tuple(row[name] for name in key), row) for row in rows]
        return found

    def _judge(self, rows: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]]) -> None:
        assert self.base is not None
        truth = Truth(self.recorder.parts, [self.base], added=None)
        for entry in (entry for reader in self.readers for entry in reader.journal if entry.kind == CHANGE):
            truth.note_told(entry.offset, parse_ts(entry.body["ts"]))
        failures = [self.recorder.failure] if self.recorder.failure else []
        failures += self.history.defects[:10] + self._judge_log() + self._judge_tables(truth, rows)
        if "Traceback" in (said := (self.folder / "data" / "server.err").read_text(errors="replace")):
            failures.append("the server met what it did not expect: " + said[said.index("Traceback") :][:3000])
        for reader in self.readers:
            if found := self._judge_reader(reader, truth):
                failures.append(f"{reader.name} {reader.spec} losses {reader.losses}:\n  " + "\n  ".join(found[:12]))
        assert not failures, "\n".join(failures)
        entries = sum(len(reader.journal) for reader in self.readers)
        print(f"seed {self.seed}: {truth.latest} changes, {entries} entries; {self.events}; {dict(self.history.codes)}")
        assert self.history.codes["ok"] > 50 and entries > 1000, "too little happened"

    def _judge_log(self) -> list[str]:
        """Order, whole transactions, and what writers were told; by the log alone."""
        parts = self.recorder.parts
        changes, durable, atomic, ordered = placed(parts), Durable(), Atomic(), Ordered()
        self.rewritten.note_reading(changes)
        ordered.check(changes, first=1)
        atomic.check_parts(parts)
        for mark, size in self.history.acknowledged.items():
            atomic.note_size(mark, size)
            durable.note_acknowledged(mark, size)
        atomic.check(changes)
        for mark in (*self.history.refused, "never"):
            durable.note_refused(mark)
        for mark in (each.mark for each in changes if each.mark is not None):
            durable.note_found(mark)
        durable.check()
        answered, constant = Answered(), Constant()
        answered.check(changes, self.history.places)
        assert self.base is not None
        constant.check(changes, "account", "balance", {key: row["balance"] for key, row in self.base.rows["account"]})
        validators: list[Validator] = [self.rewritten, ordered, atomic, durable, answered, constant]
        return [text for validator in validators for text in validator.failures]

    def _judge_tables(self, truth: Truth, rows: dict[str, Any]) -> list[str]:
        """The log folds strictly, and what it folds to is what the tables hold."""
        whole = truth.whole("objects_json")
        journal = [Entry(BEGIN, 0), *(Entry(CHANGE, offset, body) for offset, body in whole.bodies.items())]
        failures = validate([*journal, Entry(REACHED, truth.latest)], whole, set(), truth.latest, streams=False)
        base = Base(truth.latest, rows)
        wanted = Expected(Truth([], [base]), Spec(), tables=whole.tables).state(truth.latest)
        mine = {key: str(image) for key, image in whole.state(truth.latest).items() if key[0] in TABLES}
        theirs = {key: str(image) for key, image in wanted.items()}
        odd = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
        if whole.void.intersection(TABLES):
            failures.append(f"a snapshot was asked for without a reason: {whole.void}")
        if odd:
            one = odd[0]
            failures.append(f"{len(odd)} rows differ; {one} is {mine.get(one)} in the log, {theirs.get(one)} in fact")
        return failures

    def _judge_reader(self, reader: Reader, truth: Truth) -> list[str]:
        spec, defects = reader.spec, [*reader.defects[:5], *(f"lost: {reason}" for reason in reader.losses)]
        streams = spec.transport not in ("poll", "long_poll")
        refused = self.history.refused | {"never"}
        return defects + validate(reader.journal, Expected(truth, spec), refused, reader.goal, streams=streams)


def _fit(spec: Spec) -> Spec:
    """Tables that change their shape have no snapshot to be judged by; what is not known has one way to be shown."""
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
    if not spec.tables and spec.start == "snapshot":
        fields["tables"] = TABLES
        if spec.transport in ("ndjson", "changes_sse"):
            fields["tables"] = ("line",)
    if not spec.tables:
        fields["format"] = "objects_json"
    return Spec(**fields)
