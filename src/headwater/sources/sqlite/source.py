"""SQLite as a source: one file, captured by triggers, read by a pool, written by one thread."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import apsw

from headwater.errors import SourceMismatch, Unavailable
from headwater.model.change import Transaction
from headwater.model.dependencies.dependency import Analysis
from headwater.model.keys.key import Span
from headwater.model.literal import Value
from headwater.model.predicate import key_is
from headwater.model.principal import OWNER
from headwater.model.query.query import Query
from headwater.model.table import Key, Row, Table
from headwater.sources.capture_stream import Notes
from headwater.sources.query import Args, Read
from headwater.sources.read import BulkAddress, Chunk, Look, Sample
from headwater.sources.sqlite.capture.capture_table import PAGE, Follower
from headwater.sources.sqlite.capture.capture_trim import Trimmer
from headwater.sources.sqlite.capture.commit_watch import Waker
from headwater.sources.sqlite.capture.file_history import Facts, compare, judge
from headwater.sources.sqlite.capture.power_loss import Witness
from headwater.sources.sqlite.capture.trigger_installation import (
    add_columns,
    capturable,
    check_format,
    demand_resnapshot,
    install_anew,
    is_installed,
    meta,
    newest,
    reconcile,
)
from headwater.sources.sqlite.connection import OURS, immediate, sqlite_errors
from headwater.sources.sqlite.connection_pool import Pool, limit_temporary
from headwater.sources.sqlite.file_head import Glance
from headwater.sources.sqlite.file_lock import FileLock, InodeLock
from headwater.sources.sqlite.key_order import order
from headwater.sources.sqlite.query.analysis.analysis import Analyses
from headwater.sources.sqlite.query.query_sql import query_sql
from headwater.sources.sqlite.query.where import Predicates, SqliteCondition
from headwater.sources.sqlite.read.key_order_page import read_chunk
from headwater.sources.sqlite.read.sample import read_sample
from headwater.sources.sqlite.settings import SqliteConfig
from headwater.sources.sqlite.setup.database_file import Connected, open_database
from headwater.sources.sqlite.write.interactive_transaction import SqliteTx
from headwater.sources.sqlite.write.session import SqliteSession, run_statement
from headwater.sources.sqlite.write.writer import Ledger, Writer
from headwater.sources.table_creation import rows_only
from headwater.sources.write import Work, Written

T = TypeVar("T")
MODE = "journal_mode_before"  # a note, until the file itself has it
READERS = 8  # read connections: more only wait for each other on two cores


class SqliteSource:
    """Fulfils `Source`. Usable once `prove` said "" or `restart` was called."""

    def __init__(self, name: str, path: str, *, notes: Notes, config: SqliteConfig, vfs: str | None = None) -> None:
        self.name, self.path, self.beginning = name, os.path.abspath(path), 0
        self._config, self._notes, self._vfs = config, notes, vfs
        self._lock, self._is_open = FileLock(self.path), False
        self._witness = Witness(notes)
        self._predicates = Predicates()
        self._vouched = -1  # the schema_version that capture was last made to fit
        self._doubted = ""  # why the file is not what the log tells of
        self._analyses = Analyses(lambda: self._vouched)
        try:
            self._open()
        except BaseException:
            self._lock.release()
            raise

    def _open(self) -> None:
        self._vouched = -1
        with contextlib.ExitStack() as undo:
            self._inode = InodeLock(self.path)
            undo.callback(self._inode.release)
            self._file = open_database(self.path, vfs=self._vfs, config=self._config)
            undo.callback(self._file.close)
            self._connect()
            undo.pop_all()

    def _connect(self) -> None:
        self.inode = self._file.inode
        self._waker = Waker(os.path.realpath(self.path) + "-wal")
        writing = self._file.connect()
        session = self._session(writing)
        self._guard = writing.guard
        self._writer = Writer(writing.db, writing.guard, writing.catalog, session, self._committed, self._lost)
        file = self._file
        self._pool = Pool(file.connect, READERS, lambda reader: file.disconnect(reader.db))
        self._own = self._file.connect_bare()
        self._own_lock = threading.Lock()  # guards _own
        self._glance = Glance(self._file, self._analyses)
        self._transactions: set[SqliteTx] = set()
        self._trimmer = Trimmer(
            self._notes,
            lambda work: self._writer.submit(work, ours=True, caller=OURS),
            self._guard,
            rows=self._config.trim_rows,
            seconds=self._config.trim_seconds,
        )
        self._follower = Follower(
            self._file.connect_bare(),
            nonces=lambda: self._trimmer.nonces,
            reconcile=self._reconcile,
            demand_resnapshot=self._demand_resnapshot,
            saw_foreign=self._witness.saw_foreign,
        )
        self._is_open = True

    def _session(self, own: Connected, before_write: Callable[[], None] = lambda: None) -> SqliteSession:
        return SqliteSession(
            own.db,
            own.guard,
            own.catalog,
            self._config.tables,
            known_good=lambda: self._follower.known_good,
            before_write=before_write,
        )

    @property
    def snapshot_positions(self) -> None:
        """None: each read carries its own offset."""
        return None

    def bulk_address(self) -> BulkAddress:
        """Return the file for the bulk worker."""
        return BulkAddress("sqlite", self.path, self.inode)

    def remedy(self, table: str) -> str:
        """Return "": changes carry whole rows."""
        return ""

    # --- history ---------------------------------------------------------------------------------------------

    def prove(self, *, generation: str, latest: int, read: Callable[[int], Iterator[Transaction]]) -> str:
        """Why the log is not this file's history; "" if it is. A file never seen before joins a new log."""
        with self._own_lock, sqlite_errors(self.path):
            installed = is_installed(self._own)
        if not installed and latest:
            return self._another("the file has no capture tables: it is another file, or was detached")
        if not installed:
            self._install(generation, 0)
            return ""
        head = self.head()
        with self._own_lock, sqlite_errors(self.path):
            check_format(self._own)
            facts = Facts(
                file_generation=meta(self._own, "generation"),
                log_generation=generation,
                file_nonce=meta(self._own, "nonce"),
                log_nonces=(self._notes.note("nonce"), self._notes.note("pending_nonce")),
                head=head,
                latest=latest,
            )
        reason = judge(facts)
        if reason:
            return self._another(reason)
        reason = self._witness.doubt()
        if not reason:
            self._file.enter_wal()
            with self._own_lock, sqlite_errors(self.path):
                add_columns(self._own)
            oldest = self._follower.oldest()
            reason = compare(self._follower.rows(oldest - 1, latest), read(max(oldest - 1 - PAGE, 0)), latest)
            self._trimmer.start(facts.file_nonce, oldest - 1)
            self._notes.set_notes(path=os.path.realpath(self.path))  # a file may be moved
            self._witness.begin()
        return reason

    def _another(self, reason: str) -> str:
        """`reason`, unless the log is of another file that still exists: that one's history is not ours to end."""
        home = self._notes.note("path")
        if home and home != os.path.realpath(self.path) and os.path.exists(home):
            raise SourceMismatch(
                f"the log of {self.name!r} is of {home}, not of {self.path}",
                hint=f"Give this database a name of its own (NAME={self.path}) or another --data folder.",
            )
        return reason

    def restart(self, *, generation: str, first: int) -> int:
        """Begin a new generation in this file."""
        return self._install(generation, first - 1) + 1

    def reopen(self) -> None:
        """Open the file at our path anew: it was swapped for another."""
        self._shut()
        self._open()

    def _install(self, generation: str, seq: int) -> int:
        mode = self._enter_wal()
        nonce = secrets.token_hex(8)
        self._notes.set_notes(nonce=nonce, pending_nonce="", path=os.path.realpath(self.path))
        told = {"generation": generation, "nonce": nonce, "journal_mode_before": mode}

        def work(_: object) -> int:
            with self._guard.own() as db, sqlite_errors(self.path), immediate(db):
                begun = install_anew(db, seq=seq, **told)
                reconcile(db, self._config.tables, known_good=0, first=True)
                return begun

        begun = self._writer.submit(work, alone=True).result().value
        self._notes.set_notes(**{MODE: ""})
        self._trimmer.start(nonce, begun)
        self._witness.begin()
        self._doubted = ""
        return begun

    def _enter_wal(self) -> str:
        """Turn the file into WAL mode; return the mode it had, also if a start that was killed changed it."""
        mode = self._file.journal_mode_before
        if mode == "wal":
            return self._notes.note(MODE) or mode
        self._notes.set_notes(**{MODE: mode})
        self._file.enter_wal()
        return mode

    # --- following -------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Table]:
        """The tables as they are now."""
        with self._pool.read() as reader:
            return reader.catalog.tables()

    def head(self) -> int:
        """The newest offset in the file."""
        with self._own_lock, sqlite_errors(self.path):
            return newest(self._own)

    def follow(self, *, after: int) -> Iterator[Transaction]:
        """Committed transactions after `after`, up to the head of this call."""
        try:
            self._check_lock()
            self._check_swapped()
            yield from self._follower.follow(after)
        except SourceMismatch as error:
            self._vouched, self._doubted = -1, error.message  # no answer has a tag, and nobody takes a snapshot
            raise

    def wait(self, timeout: float) -> None:
        """Sleep until something may have been committed."""
        self._waker.wait(min(timeout, self._config.poll_seconds))

    def wake(self) -> None:
        """End a wait now."""
        self._waker.wake()

    def acknowledge(self, upto: int) -> None:
        """The log holds everything at or below `upto`."""
        self._trimmer.acknowledge(upto)

    def _committed(self, head: int) -> None:
        self._waker.wake()

    def _lost(self) -> Unavailable | None:
        if self._file.is_there():
            return None
        return Unavailable(f"{self.path} was replaced while this was written", hint="Look before you repeat it.")

    def _check_lock(self) -> None:
        """Whoever removes the lock file lets a second server in: take it again, or stand aside for that one."""
        if self._lock.is_held:
            return
        try:
            lock = FileLock(self.path)
        except SourceMismatch as error:
            raise Unavailable(error.message, hint="Its lock file was removed. Stop one of the two servers.") from error
        self._lock.release()
        self._lock = lock

    def _check_swapped(self) -> None:
        if not self._file.is_there():
            raise SourceMismatch(f"{self.path} was replaced by another file", hint="Readers need a new snapshot.")

    def _reconcile(self, known_good: int) -> int:
        def work(_: object) -> int:
            with self._guard.own() as db:
                reconcile(db, self._config.tables, known_good=known_good)
                return int(str(db.pragma("schema_version")))

        self._vouched = self._writer.submit(work, ours=True, caller=OURS).result().value
        return self._vouched

    def _demand_resnapshot(self, tables: set[str]) -> None:
        def work(_: object) -> None:
            with self._guard.own() as db:
                demand_resnapshot(db, tables, "images of a key do not chain")

        self._writer.submit(work, ours=True, caller=OURS).result()

    # --- reading and writing ---------------------------------------------------------------------------------

    def release(self, reason: str) -> None:
        """Do nothing: changes stay in the file, in our tables, until a log has them."""

    def check_sql(self, role: str, statement: str = "", args: Args = ()) -> None:
        """Raise Forbidden unless an owner asks, or it is a SELECT, INSERT, UPDATE or DELETE.

        The authorizer restricts everything else.
        """
        if statement and role != OWNER:
            with self._pool.read() as reader:
                reader.catalog.look()
                found = reader.guard.examine(statement)
                if found.schema or not found.rows:
                    raise rows_only()

    def read(self, sql: str, args: Args = (), *, role: str = OWNER) -> Read:
        """Run one read-only statement."""
        with self._pool.read() as reader:
            reader.catalog.look()
            result = run_statement(reader.db, reader.guard, reader.catalog, sql, args)
            return Read(result.columns, result.rows, reader.offset(), result.truncated)

    def look(self) -> Look:
        """Where the file stands."""
        with self._pool.read() as reader:
            return self._analyses.look(reader)

    def glance(self) -> Look | None:
        """The same at once, or not at all."""
        return self._glance.look()

    def text(self, query: Query) -> str:
        """A query of the JSON form as SQL."""
        return query_sql(query)

    def analyse(self, sql: str) -> Analysis:
        """What one read-only statement depends on."""
        with self._pool.read() as reader:
            return self._analyses.analyse(reader, sql)

    def answer(self, analysis: Analysis, args: dict[str, Value], *, guards: bool = False) -> Read | None:
        """Run it, unless it means something else by now."""
        with self._pool.read() as reader:
            return self._analyses.answer(reader, analysis, args, guards=guards)

    def is_read_only(self, sql: str, args: Args = (), *, role: str = OWNER) -> bool:
        """Whether the engine itself says that `sql` writes nothing."""
        with self._pool.read() as reader:
            reader.catalog.look()
            return reader.guard.examine(sql).read_only

    def get(self, table: str, key: Key) -> tuple[Table, Row | None, int]:
        """One row by its key."""
        with self._pool.read() as reader:
            session = self._session(reader)
            shape = session.describe(table)
            rows = session.select(table, key_is(shape, key), 1)
            return shape, rows[0] if rows else None, reader.offset()

    def chunk(self, table: str, *, after: Key | None, span: Span | None, limit: int) -> Chunk:
        """At most `limit` rows in key order with keys after `after`, inside `span`."""
        if self._doubted:
            raise Unavailable(self._doubted, hint="The log is of another history. See `headwater status`.")
        with self._pool.read() as reader:
            return read_chunk(reader, table, after=after, span=span, limit=limit)

    def sample(self, table: str, size: int) -> Sample:
        """About `size` rows, spread evenly over `table`."""
        with self._pool.read() as reader:
            return read_sample(reader, table, size)

    def condition(self, table: Table, where: str) -> SqliteCondition:
        """The predicate `where` over rows of `table`."""
        return self._predicates.condition(table, where)

    def order(self, table: Table, columns: Sequence[str]) -> Callable[[Key], bytes]:
        """How SQLite compares values of `columns`."""
        return order(table, columns)

    def stored(self, table: Table, columns: Sequence[str], values: Key) -> Key:
        """`values` as `columns` would hold them."""
        return self._predicates.stored(table, columns, values)

    def write(self, work: Work[T], *, role: str = OWNER, caller: str = "") -> Future[Written[T]]:
        """Run `work` in a transaction of its own; done when durable."""
        return self._writer.submit(work, caller=caller)

    def begin(self, *, read_only: bool = False, role: str = OWNER) -> SqliteTx:
        """Open an interactive transaction."""
        own = self._file.connect()
        with sqlite_errors(self.path):
            if read_only:
                limit_temporary(own)
            tx = SqliteTx(
                own.db,
                own.guard,
                Ledger(own.guard, own.catalog),
                lambda hook: self._session(own, hook),
                self._writer,
                read_only=read_only,
                seconds=self._config.tx_seconds,
                idle_seconds=self._config.tx_idle_seconds,
                finished=lambda tx, offset: self._tx_finished(tx, own.db, offset),
                lost=self._lost,
            )
        self._transactions.add(tx)
        return tx

    def _tx_finished(self, tx: SqliteTx, db: apsw.Connection, offset: int) -> None:
        self._transactions.discard(tx)
        self._file.disconnect(db)
        if offset:
            self._committed(offset)

    # --- life ------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Numbers for the status page and metrics."""
        with self._pool.read() as reader:
            head = reader.offset()
            reader.catalog.refresh()
            active = sorted(layout.table.name for layout in reader.catalog.layouts.values() if layout.active)
            with reader.guard.own() as db:
                _, refused = capturable(db, self._config.tables)
        return {
            "path": self.path,
            "head": head,
            "tables": active,
            "uncaptured": refused,
            "capture_rows": head - self._trimmer.trimmed,
            "writes_waiting": self._writer.waiting,
            "commits": self._writer.groups,
            "writes": self._writer.members,
            "open_transactions": len(self._transactions),
        }

    def finish_writes(self) -> None:
        """Take no more writes; return when the queued ones are durable."""
        for tx in list(self._transactions):
            tx.abandon()
        self._writer.close()

    def close(self) -> None:
        """Finish queued writes and release the file."""
        self._shut()
        self._witness.end()
        self._lock.release()

    def _shut(self) -> None:
        if not self._is_open:  # an earlier attempt to open the file anew got no further
            return
        self._is_open = False
        self.finish_writes()
        self._pool.close()
        self._waker.close()
        self._file.close()
        self._inode.release()
