"""A session with PostgreSQL, statement by statement, by the extended protocol: never two statements in one text.

Every statement is sent as text with separate parameters, and every cell is received as text (see `types.SETTINGS`,
which each transaction sets). Threads wait on the socket, so that other threads can run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import psycopg
from psycopg import pq

from headwater.errors import Busy, HeadwaterError, InvalidRequest, SourceError, Unavailable
from headwater.model.work.answer_limits import MEMORY, AnswerRows, Reservation, extra_memory_of_utf8, too_large, weight
from headwater.model.work.work_context import CALLER
from headwater.sources.postgres.abandoned_statements import RUNNING, AbandonedStatements
from headwater.sources.postgres.errors import CANCELED, connection_lost, from_result, state_of, timed_out, unreachable
from headwater.sources.postgres.received_bytes import ReceivedBytes
from headwater.sources.postgres.types import SETTINGS
from headwater.sources.postgres.values import Bound, array_text, cell_reader

Connect = Callable[[], "psycopg.Connection[Any]"]
T = TypeVar("T")
WAIT_SECONDS = 30.0  # longest wait for a link while all are in use
SPARE = 8 << 20  # bytes that may be received past the limit of an answer: names, types, rows not yet counted
WORDS = 1 << 20  # bytes of an answer to a caller's text that does not return the caller's rows, at most
GRACE_SECONDS = 5.0  # wait past a statement's time limit for PostgreSQL to end it
CHUNK = 256  # rows of an answer read from the socket at a time
CAN_CHUNK = pq.version() >= 170000  # older libpq returns an answer whole
_FAILED = pq.ExecStatus.FATAL_ERROR, pq.ExecStatus.BAD_RESPONSE, pq.ExecStatus.PIPELINE_ABORTED
_COPIES = pq.ExecStatus.COPY_IN, pq.ExecStatus.COPY_OUT, pq.ExecStatus.COPY_BOTH
# Notices are not used, and a function can send any number of them.
_SETTINGS = {**SETTINGS, "client_min_messages": "error"}
_SET = "".join(f"; SET LOCAL {name} = '{value}'" for name, value in _SETTINGS.items())
logger = logging.getLogger("headwater.postgres")

Cells = tuple[bytes | None, ...]


class Answer(msgspec.Struct, frozen=True):
    """The answer to a statement: its rows as texts, or the number of affected rows."""

    columns: tuple[str, ...] = ()
    oids: tuple[int, ...] = ()
    rows: list[Cells] = []
    affected: int = 0
    tag: str = ""  # the command, such as `INSERT`
    truncated: bool = False
    reservation: Reservation | None = None  # of a caller's answer

    def values(self) -> list[tuple[Any, ...]]:
        """Return the rows with each cell converted to a value by its type."""
        readers = [cell_reader(oid) for oid in self.oids]
        return [tuple([read(cell) for read, cell in zip(readers, row, strict=True)]) for row in self.rows]

    def answer_rows(self) -> AnswerRows:
        """Return the rows as values, with the memory reservation, which their release frees."""
        return AnswerRows.of(self.values(), self.reservation or Reservation())

    def texts(self) -> list[tuple[str | None, ...]]:
        """Return the rows with each cell as PostgreSQL's text; None for NULL."""
        return [tuple([None if cell is None else cell.decode() for cell in row]) for row in self.rows]


class Link:
    """A connection, used by one thread at a time; `cancel` and `sever` may be called by other threads."""

    def __init__(self, connect: Connect, abandoned: AbandonedStatements | None = None) -> None:
        try:
            self._connection = connect()
        except (psycopg.Error, SourceError) as error:
            raise unreachable(error) from error
        self._abandoned = AbandonedStatements() if abandoned is None else abandoned
        self._caller = ""  # the caller of the transaction
        self._ending = threading.Lock()  # held while the socket is closed or shut down
        self._seconds: float | None = None  # time limit of each statement of the transaction
        self._until: float | None = None  # deadline of the running statement
        self._unfinished = 0  # bytes received of an incomplete result
        self._pg = self._connection.pgconn
        self.version = self._pg.server_version
        self.is_tainted = False  # a caller's statement may have changed the session, which is then not reused
        self._named: dict[str, bytes] = {}  # our prepared statements of this session
        try:  # checked now: after a promotion, a standby's earlier snapshot could not be recognised
            ((is_standby,),) = self.run("SELECT pg_is_in_recovery()").texts()
            self.refuse_standby(is_standby)
        except HeadwaterError:
            self.close()
            raise

    def refuse_standby(self, answer: str | None) -> None:
        """Raise SourceError if `answer`, the text of `pg_is_in_recovery()`, shows a standby."""
        if answer != "f":
            self.is_tainted = True
            raise SourceError(
                "a session was opened on a standby, whose snapshots do not list open transactions",
                hint="Name the primary in the address, or several hosts with target_session_attrs=primary.",
            )

    # --- one statement -----------------------------------------------------------------------------------

    def run(
        self,
        sql: str,
        params: Sequence[Bound] = (),
        types: Sequence[int] | None = None,
        *,
        max_rows: int | None = None,
        to_end: bool = True,
        max_bytes: int | None = None,
    ) -> Answer:
        """Run a statement; discard rows beyond `max_rows`. Raises our errors.

        With `max_bytes`, a larger answer, an error's text included, closes the connection: InvalidRequest.

        With `max_rows` the statement is a caller's: its answer counts against the memory of answers, and AnswerTooLarge
        closes the connection. Unless `to_end`, it is cancelled at the limit, which fails the transaction: the caller
        rolls it back.
        """
        with self._broken_is_ours():
            self._pg.send_query_params(_encoded(sql), params, types)
            if max_rows is None:
                return self._collect(None, True, max_bytes)
            if CAN_CHUNK:
                self._pg.set_chunked_rows_mode(CHUNK)
            else:
                self._pg.set_single_row_mode()
            return self._collect(max_rows, to_end)

    def _give_up(self) -> None:
        """Cancel a statement whose answer is too large, and close the connection, which still receives the rest."""
        self.is_tainted = True
        self.cancel()
        self._finish()

    def _finish(self) -> None:
        with self._ending:
            self._pg.finish()

    def parts(self, sql: str, rows: int) -> Iterator[pq.abc.PGresult]:
        """Run a statement of our own without parameters; yield its answer as libpq results of `rows` rows each. All of
        them must be consumed."""
        with self._broken_is_ours():
            self._pg.send_query_params(sql.encode(), None)
            if CAN_CHUNK:
                self._pg.set_chunked_rows_mode(rows)
            fault: HeadwaterError | None = None
            for result in self._results():
                if result.status in _FAILED:
                    fault = fault or from_result(result)
                elif fault is None:
                    yield result
            if fault is not None:
                raise fault

    def again(self, sql: str) -> Answer:
        """Run a statement of our own without parameters, prepared in the session: it is parsed and planned once."""
        with self._broken_is_ours():
            name = self._named.get(sql)
            if name is None:
                name = f"headwater_{len(self._named)}".encode()
                self._pg.send_prepare(name, sql.encode())
                self._collect(None, True)
                self._named[sql] = name
            self._pg.send_query_prepared(name, ())
            return self._collect(None, True)

    def prepare(self, sql: str, types: Sequence[int] | None = None) -> tuple[int, ...]:
        """Let PostgreSQL parse a statement without running it; return the types of its parameters."""
        return self.describe(sql, types)[0]

    def describe(self, sql: str, types: Sequence[int] | None = None) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Parse a statement as `prepare` does; return its parameter types and the names of its columns."""
        with self._broken_is_ours():
            self._pg.send_prepare(b"", _encoded(sql), types)
            self._collect(None, True, WORDS)
            self._pg.send_describe_prepared(b"")
            (found,) = self._results(max_bytes=WORDS)
            _check(found)
            names = tuple((found.fname(place) or b"").decode() for place in range(found.nfields))
            return tuple(found.param_type(place) for place in range(found.nparams)), names

    def script(self, sql: str) -> None:
        """Run several statements of our own, sent in one text; raise the first error."""
        with self._broken_is_ours():
            self._pg.send_query(sql.encode())
            for result in list(self._results()):  # read all results: only then the state of the connection is known
                _check(result)

    def _collect(self, max_rows: int | None, to_end: bool, max_bytes: int | None = None) -> Answer:
        columns: tuple[str, ...] = ()
        oids: tuple[int, ...] = ()
        rows: list[Cells] = []
        more, affected, tag = False, 0, ""
        fault: HeadwaterError | None = None
        reservation = None if max_rows is None else Reservation()
        try:
            for result in self._results(reservation, max_bytes):
                if result.status in _FAILED:
                    fault = fault or from_result(result)
                    if max(self._unfinished, len(result.error_message)) > WORDS:
                        self.is_tainted = True  # libpq would keep buffers of that size for this connection
                        self._finish()
                        break
                    continue
                if result.status in _COPIES:
                    self._finish()
                    raise InvalidRequest(
                        "COPY to or from the client is not supported", hint="Use INSERT, or the pull API."
                    )
                if not columns and result.nfields:
                    places = range(result.nfields)
                    columns = tuple((result.fname(p) or b"").decode() for p in places)
                    oids = tuple(result.ftype(p) for p in places)
                for row in range(result.ntuples):
                    if max_rows is not None and len(rows) >= max_rows:
                        if not (more or to_end):
                            self.cancel()
                        more = True
                        break
                    cells = tuple([result.get_value(row, place) for place in range(result.nfields)])
                    rows.append(cells)
                    if reservation is not None:
                        try:
                            reservation.add(weight(cells), len(cells), extra_memory_of_utf8(cells))
                        except HeadwaterError:
                            self._give_up()
                            raise
                if result.command_status:  # in the last result, or the last with rows
                    tag, affected = result.command_status.decode(), result.command_tuples or 0
        except BaseException:  # the exception may keep this frame alive
            rows.clear()
            cells, result = (), None
            if reservation is not None:
                reservation.release()
            raise
        if fault is not None and not (more and not to_end and state_of(fault) == CANCELED):
            raise fault
        command = tag.rpartition(" ")[0] if tag[-1:].isdigit() else tag
        return Answer(columns, oids, rows, affected, command, more, reservation)

    def _results(
        self, reservation: Reservation | None = None, max_bytes: int | None = None
    ) -> Iterator[pq.abc.PGresult]:
        """Yield the results of the sent statements; with `reservation`, those of a caller's statement.

        libpq buffers a row or an error until it is complete, so the bytes are counted here as they are received.
        """
        self._until = None if self._seconds is None else time.monotonic() + self._seconds + GRACE_SECONDS
        is_counted = reservation is not None or max_bytes is not None
        counter = ReceivedBytes(self._pg.socket, is_one_message=max_bytes is not None) if is_counted else None
        received = 0
        self._flush()
        while True:
            self._unfinished = 0
            while self._pg.is_busy():
                self._wait(select.POLLIN)
                if counter is not None:
                    counter.before_read()
                self._pg.consume_input()
                if counter is not None:
                    read = counter.after_read()
                    self._unfinished += read
                    received += read
                if reservation is not None:
                    self._count(reservation, self._unfinished)
                if max_bytes is not None and received > max_bytes:
                    self._give_up()
                    raise InvalidRequest(
                        f"PostgreSQL's answer to the text has more than {max_bytes} bytes",
                        hint="Write a shorter text, without constants that are computed to large values.",
                    )
            result = self._pg.get_result()
            if result is None:
                return
            yield result

    def _count(self, reservation: Reservation, unfinished: int) -> None:
        """Count the received bytes of incomplete rows in `reservation`; close the connection if they are too many."""
        try:
            if reservation.bytes + unfinished > MEMORY.max_bytes + SPARE:
                raise too_large()
            reservation.take(reservation.memory + unfinished)
        except HeadwaterError:
            self._give_up()
            raise

    def _flush(self) -> None:
        while self._pg.flush():
            self._wait(select.POLLIN | select.POLLOUT)
            self._pg.consume_input()

    def _wait(self, what: int) -> None:
        poll = select.poll()
        poll.register(self._pg.socket, what)
        if self._until is None:
            poll.poll()
        elif not poll.poll(max(self._until - time.monotonic(), GRACE_SECONDS) * 1000):
            self._abandon()
            raise timed_out()

    def _abandon(self) -> None:
        """Close the connection though PostgreSQL still runs the statement."""
        logger.warning("a statement was past its time limit and PostgreSQL did not end it: its connection is closed")
        self.is_tainted = True
        self._abandoned.add(self._pg.backend_pid, self._caller)
        self._finish()

    @contextlib.contextmanager
    def _broken_is_ours(self) -> Iterator[None]:
        try:
            yield
        except (psycopg.Error, ValueError) as error:  # ValueError: the socket is closed
            raise connection_lost(str(error)) from error

    # --- transactions ------------------------------------------------------------------------------------

    def begin(
        self,
        *,
        read_only: bool = False,
        seconds: float | None = None,
        lock_seconds: float = 0,
        is_trusted: bool = False,
    ) -> None:
        """Begin a transaction with a single snapshot and our settings.

        With `seconds` the transaction is for the caller of this context. Raises Busy while PostgreSQL runs statements
        that it could not end: see AbandonedStatements.
        """
        limit = "" if seconds is None else f"; SET LOCAL statement_timeout = {max(round(seconds * 1000), 1)}"
        lock = f"; SET LOCAL lock_timeout = {round(lock_seconds * 1000)}" if lock_seconds else ""
        mode = "READ ONLY" if read_only else "READ WRITE"
        self._seconds, self._caller = seconds, CALLER.get()
        self.script(f"BEGIN ISOLATION LEVEL REPEATABLE READ {mode}{_SET}{limit}{lock}")
        if seconds is not None and self._abandoned.may_refuse(self._caller, is_trusted=is_trusted):
            self._abandoned.check(self._running, self._caller, is_trusted=is_trusted)

    def _running(self, processes: Collection[int]) -> dict[int, str | None]:
        return dict(self.run(RUNNING, [array_text([str(process) for process in processes])]).values())

    def commit(self) -> bool:
        """Commit; return whether the transaction was kept. COMMIT rolls back a transaction that failed before."""
        self._seconds = None  # PostgreSQL does not limit COMMIT either: after a timeout the outcome would be unknown
        return self.run("COMMIT").tag == "COMMIT"

    def rollback(self) -> None:
        """Roll back the transaction, if there is one."""
        if self.in_transaction:
            self.script("ROLLBACK")

    @property
    def in_transaction(self) -> bool:
        """Return whether a transaction is open, failed or not."""
        return self._pg.transaction_status in (pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR)

    @property
    def is_alive(self) -> bool:
        """Return whether the connection is open, as far as is known."""
        return self._pg.status == pq.ConnStatus.OK

    def clean(self) -> None:
        """Remove all that a caller left in a tainted session: settings, roles, locks, temporary tables."""
        if self.is_tainted:
            self.run("DISCARD ALL")
            self._named.clear()
            self.is_tainted = False

    def cancel(self, patience: float = 2.0) -> None:
        """Ask PostgreSQL to cancel the running statement, from any thread; wait up to `patience` seconds."""
        with contextlib.suppress(psycopg.Error):
            self._connection.cancel_safe(timeout=patience)

    def sever(self) -> None:
        """Shut the connection down, from another thread: its wait for an answer fails, its statement is abandoned."""
        with self._ending, contextlib.suppress(psycopg.Error, OSError):
            process = self._pg.backend_pid
            with socket.socket(fileno=os.dup(self._pg.socket)) as cut:
                cut.shutdown(socket.SHUT_RDWR)
            self._abandoned.add(process, self._caller)

    def close(self) -> None:
        """Close the connection; wait while another thread severs it."""
        with self._ending, contextlib.suppress(psycopg.Error):
            self._connection.close()


def _encoded(sql: str) -> bytes:
    if "\0" in sql:
        raise InvalidRequest("a statement cannot hold a NUL character")
    try:
        return sql.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("the statement holds lone surrogates", hint="Send the statement as UTF-8.") from None


def cells_of(result: pq.abc.PGresult) -> list[Cells]:
    """Return the rows of a libpq result, each cell as bytes of text or None."""
    places = range(result.nfields)
    return [tuple([result.get_value(row, place) for place in places]) for row in range(result.ntuples)]


def _check(result: pq.abc.PGresult) -> None:
    if result.status in _FAILED:
        raise from_result(result)


@contextlib.contextmanager
def own_values(are_own: bool) -> Iterator[None]:
    """Show value errors without a context to every caller, if no policy and no rule runs in the statement."""
    try:
        yield
    except HeadwaterError as error:
        if are_own and getattr(error, "is_of_unknown_values", False):
            error.names_tables = False
        raise


class RunningLinks:
    """The links that are in use. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _links
        self._links: set[Link] = set()

    @contextlib.contextmanager
    def use(self, link: Link) -> Iterator[None]:
        """Count `link` as in use while the context is open."""
        with self._lock:
            self._links.add(link)
        try:
            yield
        finally:
            with self._lock:
                self._links.discard(link)

    def cancel(self) -> bool:
        """Cancel the statements on the links in use, from another thread; return whether there were any links."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.cancel()
        return bool(links)


class Pool:
    """Pool of links for short work, at most `most` in use. Thread-safe; work must not request another link."""

    def __init__(
        self, connect: Connect, most: int = 8, abandoned: AbandonedStatements | None = None, *, is_trusted: bool = False
    ) -> None:
        """Create a pool; `is_trusted`: for our own statements and those of owners."""
        self._connect, self._is_trusted = connect, is_trusted
        self.abandoned = AbandonedStatements() if abandoned is None else abandoned
        self.running = RunningLinks()
        self._slots = threading.BoundedSemaphore(most)
        self._most = most
        self._lock = threading.Lock()  # guards the fields below
        self._idle: list[Link] = []
        self._epoch = 0
        self._closed = False

    def read(self, work: Callable[[Link], T], seconds: float | None = None) -> T:
        """Return the result of `work` in a read-only transaction with one snapshot. Busy after 30 s without a link."""
        return self._run(work, read_only=True, seconds=seconds)

    def probe(self, work: Callable[[Link], T], seconds: float | None = None) -> T:
        """Return the result of `work` in a transaction that is rolled back. Busy after 30 s without a link."""
        return self._run(work, read_only=False, seconds=seconds)

    def _run(self, work: Callable[[Link], T], *, read_only: bool, seconds: float | None) -> T:
        """Run `work` in a transaction; take another link if an idle one turns out to be dead before it."""
        if not self._slots.acquire(timeout=WAIT_SECONDS):
            raise Busy(f"{self._most} reads of PostgreSQL are running already")
        try:
            while True:
                link, was_idle, epoch = self._take()
                try:
                    with self.running.use(link):
                        try:
                            link.begin(read_only=read_only, seconds=seconds, is_trusted=self._is_trusted)
                        except HeadwaterError:
                            if link.is_alive or link.is_tainted or not was_idle:
                                raise
                            continue
                        value = work(link)  # never twice: a statement that ended its connection may do so again
                        link.rollback()  # nothing to keep, and a rollback is never refused
                        return value
                finally:
                    self._give_back(link, epoch)
        finally:
            self._slots.release()

    def _take(self) -> tuple[Link, bool, int]:
        with self._lock:
            if self._closed:
                raise Unavailable(
                    "Headwater has closed its connections to this database", hint="Try again in a moment."
                )
            epoch = self._epoch
            if self._idle:
                return self._idle.pop(), True, epoch
        return Link(self._connect, self.abandoned), False, epoch

    def _give_back(self, link: Link, epoch: int) -> None:
        with contextlib.suppress(HeadwaterError):
            link.rollback()
        is_fit = link.is_alive and not link.in_transaction and not link.is_tainted
        with self._lock:
            if is_fit and not self._closed and epoch == self._epoch:
                self._idle.append(link)
                return
        link.close()

    def renew(self) -> None:
        """Close idle links now and the others when they return: the address leads to another server."""
        with self._lock:
            self._epoch += 1
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    def close(self) -> None:
        """Close all links, and refuse further work."""
        with self._lock:
            self._closed = True
        self.renew()
