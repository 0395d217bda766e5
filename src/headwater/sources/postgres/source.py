"""PostgreSQL as a source: one database, captured by a slot, read by a pool.

Reading and writing tables is in reading, sampling, where, writing and tx; where they stand in the log in positions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from headwater.errors import HeadwaterError, SourceError, Unavailable
from headwater.model.change import Transaction
from headwater.model.dependencies.dependency import Analysis
from headwater.model.keys.key import Span
from headwater.model.literal import Value
from headwater.model.principal import OWNER, VIEWER
from headwater.model.query.query import Query
from headwater.model.table import Key, Row, Table
from headwater.sources.capture_stream import Notes
from headwater.sources.postgres.capture.barriers import Barriers, Passed, Side
from headwater.sources.postgres.capture.log_attachment import Attachment
from headwater.sources.postgres.capture.log_positions import Positions
from headwater.sources.postgres.capture.replication_buffer import Held, Point
from headwater.sources.postgres.capture.slot.slot import Identity
from headwater.sources.postgres.capture.slot_monitor import Watch
from headwater.sources.postgres.capture.stream.replication_stream import Stream
from headwater.sources.postgres.capture.visible_commits import Sight
from headwater.sources.postgres.connection import Connection, Server
from headwater.sources.postgres.key_order import order
from headwater.sources.postgres.protocol_session import Pool
from headwater.sources.postgres.query.analysis.analysis import Analyses
from headwater.sources.postgres.query.caller_connections import Callers
from headwater.sources.postgres.query.query_sql import query_sql
from headwater.sources.postgres.query.where import Predicates
from headwater.sources.postgres.read.row_reads import Reading
from headwater.sources.postgres.read.sample import sample
from headwater.sources.postgres.schema.catalog import describe
from headwater.sources.postgres.schema.column_probe import Columns
from headwater.sources.postgres.schema.relations import split_name
from headwater.sources.postgres.schema.table_shapes import Shapes
from headwater.sources.postgres.settings import PostgresConfig
from headwater.sources.postgres.setup.doctor import Finding, whole_rows_remedy
from headwater.sources.postgres.setup.logins import Logins
from headwater.sources.postgres.snapshot_visibility import Visibility
from headwater.sources.postgres.write.interactive_transaction import PostgresTx
from headwater.sources.postgres.write.session import is_read_only
from headwater.sources.postgres.write.writer import Writers
from headwater.sources.query import Args, Read
from headwater.sources.read import BulkAddress, Chunk, Condition, Look, Sample
from headwater.sources.write import Work, Written

T = TypeVar("T")
DOWN_SECONDS = 1.0  # without a connection before it is an error
LOOK_SECONDS = 5.0  # between two looks at what the stream does not tell: of the publication, and of tables


class PostgresSource:
    """Fulfils `Source`. Usable once `prove` said "" or `restart` was called."""

    def __init__(
        self, name: str, url: str, *, notes: Notes, config: PostgresConfig, folder: Path | None = None
    ) -> None:
        """`folder` is for what does not fit into memory; else the system's."""
        self.name, self.address, self._folder = name, url, folder
        self._server, self._config = Server(name, url), config
        # Its marks must be on disk to be streamed, but need not wait for a standby: what does, is not visible yet.
        self._side = Side(self._server, synchronous_commit="local", statement_timeout="60000")
        logins = Logins(self._server, config)
        self._attachment = Attachment(self._server, self._side, logins, notes=notes, config=config)
        self._barriers, self._visibility = Barriers(self._side, self._is_up), Visibility()
        self._arrived = threading.Event()
        self._sight = Sight(self._server, self._visibility, self._arrived.set)
        self.beginning = self._given = 0  # the newest offset of what was held: positions of it were told
        self._held: Held | None = None
        self._stream: Stream | None = None
        self._watch: Watch | None = None
        self._looked_at = 0.0
        self._schema = 0
        seconds, connect = config.statement_seconds, self._server.connect
        # Without logins for callers, their queries use the pool, too.
        self._pool = Pool(connect, is_trusted=bool(logins.roles))
        self._shapes = Shapes(self._known, self._version)
        self._callers = Callers(logins, self._pool, seconds=seconds)
        self._columns = Columns(self._pool, seconds=seconds)
        self._positions = Positions(self._barriers, self._visibility, self._notice)
        odd = self._columns.odd
        self._reading = Reading(self._pool, self._shapes, self._positions, odd, statement_seconds=seconds)
        queries = self._callers.pool(VIEWER)
        self._predicates = Predicates(queries, odd)
        self._analyses = Analyses(queries, self._positions, self._attachment.publication, statement_seconds=seconds)
        self._writers = Writers(
            self._connect,
            self._shapes,
            self._positions,
            statement_seconds=seconds,
            abandoned=self._pool.abandoned,
            grants=logins.grants,
            publish=self._attachment.publish,
        )
        self._transactions: set[PostgresTx] = set()

    def _connect(self, role: str) -> Connection:
        return self._callers.logins.server(role).connect()

    def _is_up(self) -> bool:
        stream = self._stream
        if stream is None or stream.lost is not None:
            return False
        return stream.error is None or time.monotonic() - stream.error_since < DOWN_SECONDS

    def _known(self, table: str) -> Table | None:
        held = self._held
        return None if held is None else held.whole.shapes.tables.get(table)

    def _version(self, table: str) -> int:
        held = self._held
        return 0 if held is None else held.whole.shapes.versions.get(table, 0)

    # --- history -----------------------------------------------------------------------------------------------

    def prove(self, *, generation: str, latest: int, read: Callable[[int], Iterator[Transaction]]) -> str:
        """Why the log is not this database's history; "" if it is. A database never seen before joins a new log."""
        self._halt()
        self._attachment.check()
        found = self._attachment.resume(generation, latest, read)
        if isinstance(found, str):
            return found
        self.beginning = 0 if latest else found.offset
        self._run(found)
        return ""

    def restart(self, *, generation: str, first: int) -> int:
        """Begin a new generation, with a new slot."""
        self._halt()
        self._attachment.check()
        first = max(first, self._given + 2)
        self._run(self._attachment.renew(generation, first - 1))
        return first

    def reopen(self) -> None:
        """Connect anew: what stands behind the name is not what it was."""
        self._halt()
        self._renew()

    def _renew(self) -> None:
        self._side.close()
        self._sight.close()
        self._pool.renew()
        self._callers.renew()
        self._columns.renew()

    def findings(self) -> list[Finding]:
        """What is not as it should be, with the SQL that mends it."""
        return self._side.ask(self._attachment.findings)

    def remedy(self, table: str) -> str:
        """Return the SQL after which updates carry the large values they leave unchanged."""
        parts = split_name(table)
        return "" if parts is None else self._side.ask(lambda connection: whole_rows_remedy(connection, *parts))

    def _run(self, point: Point) -> None:
        attachment, held = self._attachment, Held(point)
        attachment.mark(stopped=False)
        self._visibility.start(point.offset)
        stream = Stream(
            self._server,
            attachment.slot,
            attachment.publication,
            held,
            self,
            all_tables=attachment.is_of_all_tables,
            born_published=attachment.born_published,
            folder=self._folder,
        )
        self._held, self._stream = held, stream
        self._watch = Watch(self.name, attachment.slot, attachment.find_slot)
        stream.start()
        self._watch.start()

    def _halt(self) -> None:
        stream, self._stream = self._stream, None
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        if stream is not None:
            stream.stop()
        if self._held is not None:
            self._given = max(self._given, self._held.latest)
            self._held = None

    # --- the stream's keeper -----------------------------------------------------------------------------------

    def judge(self, identity: Identity, connection: Connection, point: Point) -> str:
        """See Keeper."""
        return self._attachment.judge(identity, connection, point, self._renew)

    def logged(self, part: Transaction, upto: int) -> None:
        """See Keeper."""
        if part.last:
            self._visibility.log(int(part.id), upto)
        self._positions.came(part, upto)

    def passed(self, token: str, offset: int) -> None:
        """See Keeper."""
        self._barriers.passed(token, offset)

    def rewound(self, point: Point) -> None:
        """See Keeper."""
        self._visibility.cut(point.offset)

    def arrived(self) -> None:
        """See Keeper."""
        self._arrived.set()

    # --- following ---------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Table]:
        """The published tables as they are now."""
        self._running()
        publication = self._attachment.publication
        return self._side.ask(lambda connection: describe(connection, publication, self._known, self._version).tables)

    def head(self) -> int:
        """The offset of the newest change that was committed before this call; Unavailable if the stream is behind."""
        found = self.look()
        if not found.settled:
            raise Unavailable(f"the stream of {self.name!r} is behind", hint="Try again in a moment.")
        return found.head

    def look(self) -> Look:
        """The same, and the number of the schema. Where the stream is behind, the head is not known: not settled."""
        held, _ = self._running()
        found = self._barriers.set()
        self._notice(found)
        if found.offset is None:
            return Look(held.latest + 1, found.schema, settled=False)
        return Look(found.offset, found.schema)

    def _notice(self, found: Passed) -> None:
        self._visibility.notice(found.snapshot)
        if found.schema != self._schema:
            self._columns.renew()
            self._callers.forget()
            held = self._held
            if held is not None:  # at once: what a query meant when it was understood must be known when that changes
                with suppress(HeadwaterError):
                    self._attachment.announce(held.whole.shapes)
            self._schema, self._looked_at = found.schema, 0.0

    def glance(self) -> Look | None:
        """Never: it takes a round trip."""
        return None

    def follow(self, *, after: int) -> Iterator[Transaction]:
        """Transactions after `after` that have come so far."""
        held, stream = self._running()
        if stream.lost is not None:
            raise stream.lost
        is_down = stream.error is not None and time.monotonic() - stream.error_since > DOWN_SECONDS
        seen = self._sight.see(held)
        trouble = stream.error if is_down else seen.trouble
        if trouble is not None and held.durable >= min(seen.upto, held.latest):
            if self._sight.gives_up():
                held.go_back()
                stream.wake()
            raise trouble
        parts = held.follow(after, seen.upto, seen.large)
        if held.wants_back:
            stream.wake()
        return parts

    def wait(self, timeout: float) -> None:
        """Sleep until something came."""
        if self._arrived.wait(timeout):
            self._arrived.clear()

    def wake(self) -> None:
        """End a wait now."""
        self._arrived.set()

    def acknowledge(self, upto: int) -> None:
        """The log holds everything at or below `upto`: the server may forget it."""
        held, stream = self._running()
        point = held.acknowledge(upto)
        stream.confirm(point.position)
        due = self._attachment.is_due
        if due(point, idle=stream.idle, confirmed=stream.confirmed, is_asked=stream.is_asked):
            self._attachment.save(point, stream)
        if time.monotonic() - self._looked_at > LOOK_SECONDS:
            self._looked_at = time.monotonic()
            self._look_around(held, stream)

    def _look_around(self, held: Held, stream: Stream) -> None:
        with suppress(HeadwaterError):
            reason = self._attachment.watch()
            if reason:
                stream.give_up(reason)
            self._attachment.announce(held.whole.shapes)
            self._attachment.join()

    def release(self, reason: str) -> None:
        """Close the replication connection, so that PostgreSQL can shut down, and refuse writes from now on."""
        self._positions.failure = reason
        self._halt()

    def _running(self) -> tuple[Held, Stream]:
        held, stream = self._held, self._stream
        self._positions.check()
        if held is None or stream is None:
            raise SourceError(f"{self.name!r} is not being followed")
        return held, stream

    # --- reading and writing -----------------------------------------------------------------------------------

    def check_sql(self, role: str, statement: str = "", args: Args = ()) -> None:
        """Raise Forbidden if the caller may not send SQL, or not this statement."""
        self._callers.check(role, statement, args)

    def read(self, sql: str, args: Args = (), *, role: str = OWNER) -> Read:
        """Run one read-only statement."""
        return self._reading.read(sql, args, self._callers.pool(role))

    @property
    def snapshot_positions(self) -> Positions:
        """The offsets of other processes' reads."""
        return self._positions

    def bulk_address(self) -> BulkAddress:
        """Return the connection strings for the bulk worker."""
        return BulkAddress("postgres", self.address, reader=self._callers.logins.server(VIEWER).address)

    def text(self, query: Query) -> str:
        """A query of the JSON form as SQL."""
        return query_sql(query)

    def analyse(self, sql: str) -> Analysis:
        """What one read-only statement depends on."""
        return self._analyses.analyse(sql)

    def answer(self, analysis: Analysis, args: dict[str, Value], *, guards: bool = False) -> Read | None:
        """Run it, unless it means something else by now. There are no guards."""
        return self._analyses.answer(analysis, args)

    def is_read_only(self, sql: str, args: Args = (), *, role: str = OWNER) -> bool:
        """Whether the engine itself says that `sql` writes nothing."""
        # It computes constants of the statement, which may take long.
        seconds = self._config.statement_seconds
        return self._callers.pool(role).read(lambda link: is_read_only(link, sql, args), seconds)

    def get(self, table: str, key: Key) -> tuple[Table, Row | None, int]:
        """One row by its key."""
        return self._reading.get(table, key)

    def chunk(self, table: str, *, after: Key | None, span: Span | None, limit: int) -> Chunk:
        """At most `limit` rows in key order with keys after `after`, inside `span`."""
        return self._reading.chunk(table, after=after, span=span, limit=limit)

    def sample(self, table: str, size: int) -> Sample:
        """About `size` rows, spread evenly over `table`."""
        return sample(self._pool, self._shapes, table, size, self._columns.odd)

    def condition(self, table: Table, where: str) -> Condition:
        """The predicate `where` over rows of `table`."""
        return self._predicates.condition(table, where)

    def order(self, table: Table, columns: Sequence[str]) -> Callable[[Key], bytes]:
        """How PostgreSQL compares values of `columns`."""
        return order(table, columns, self._columns.odd())

    def stored(self, table: Table, columns: Sequence[str], values: Key) -> Key:
        """`values` as `columns` would hold them."""
        return self._columns.stored(table, columns, values)

    def write(self, work: Work[T], *, role: str = OWNER, caller: str = "") -> Future[Written[T]]:
        """Run `work` in a transaction of its own; done when durable."""
        return self._writers.submit(work, role, caller)

    def begin(self, *, read_only: bool = False, role: str = OWNER) -> PostgresTx:
        """Open an interactive transaction."""
        tx = PostgresTx(
            partial(self._connect, role),
            self._shapes,
            self._positions,
            read_only=read_only,
            seconds=self._config.tx_seconds,
            idle_seconds=self._config.tx_idle_seconds,
            statement_seconds=self._config.statement_seconds,
            finished=self._transactions.discard,
            abandoned=self._pool.abandoned,
            is_trusted=role == OWNER,
            grants=self._callers.logins.grants,
        )
        self._transactions.add(tx)
        return tx

    # --- life --------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Numbers for the status page and metrics; `error` says why the stream stands still."""
        held, stream = self._running()
        watch, error = self._watch, stream.lost or stream.error
        slot = None if watch is None else watch.look()
        return {
            "head": held.latest,
            "capture_rows": held.changes,
            "writes": self._writers.commits,
            "writes_waiting": self._writers.waiting,
            "open_transactions": len(self._transactions),
            "tables": sorted(self.describe()),
            "uncaptured": self._side.ask(self._attachment.uncaptured),
            "slot": self._attachment.slot,
            "slot_lag_bytes": None if slot is None else slot.lag_bytes,
            "slot_safe_bytes": None if slot is None else slot.safe_bytes,
            "slot_confirmed_seconds": None if slot is None else slot.confirmed_seconds,
            "wal_status": None if slot is None else slot.wal_status,
            "connections": stream.sessions,
            "error": None if error is None else f"{error.code}: {error.message}",
        }

    def finish_writes(self) -> None:
        """Take no more writes; return when the queued ones are durable."""
        for tx in list(self._transactions):
            tx.abandon()
        self._writers.close()

    def close(self) -> None:
        """Stop reading the stream, remember where it stands, release the database."""
        self.finish_writes()
        held, stream = self._held, self._stream
        if held is not None and stream is not None:
            point = held.acknowledge(held.durable)
            with suppress(HeadwaterError):
                if not self._attachment.is_saved(point):
                    self._attachment.save(point, stream)
                self._attachment.mark(stopped=held.latest <= point.offset)
        self._halt()
        self._side.close()
        self._sight.close()
        self._callers.close()
        self._pool.close()
