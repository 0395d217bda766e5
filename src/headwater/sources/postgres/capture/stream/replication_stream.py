"""The reader thread: it keeps a replication connection, assembles transactions, and confirms safe positions.

    server --frames--> assembly --transactions--> held --> capture
                                --barriers------> the callers that wait for them
    server <--status-- the LSN that capture acknowledged; when nothing is pending, everything the server sent

A server receives no position that it has not shown on the same connection: positions are of one history, and the next
connection may lead to another history. A server that receives a position beyond the end of its WAL would skip changes.

A broken connection is made again after a delay. After a gap in the changes there is no retry: `lost` is the reason.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import psycopg
from psycopg import pq
from psycopg.pq.abc import PGconn

from headwater.errors import HeadwaterError, SourceError, SourceMismatch
from headwater.model.change import Transaction
from headwater.model.clock import wall_ms
from headwater.model.work.log_throttle import LogThrottle, counted
from headwater.sources.postgres.capture.decode import row_decoder
from headwater.sources.postgres.capture.decode.replication_frames import (
    DATA,
    DATA_HEAD,
    decode_keepalive,
    status_update,
)
from headwater.sources.postgres.capture.replication_buffer import ReplicationBuffer, TransactionEnd
from headwater.sources.postgres.capture.slot.slot import ServerIdentity, find_slot, identify, wire_error
from headwater.sources.postgres.capture.stream.replication_receiver import wire as wire_of
from headwater.sources.postgres.capture.stream.transaction_assembly import Assembly, Barrier, Item, LogEnd
from headwater.sources.postgres.capture.stream.transaction_spill import FileSpill
from headwater.sources.postgres.connection import Connection, Server
from headwater.sources.postgres.schema.catalog import CatalogReader
from headwater.sources.postgres.schema.relations import Relations
from headwater.sources.postgres.schema.shape_changes import Shapes

logger = logging.getLogger("headwater.postgres")

STATUS_SECONDS = 5.0  # longest time between two status updates to the server
SILENCE_SECONDS = 60.0  # shortest silence after which the connection counts as dead
BACK_OFF = (0.1, 10.0)  # seconds before reconnecting: first, longest
FRAMES = 64  # between two checks of the clock; a run of row frames counts as one
GONE = ("42704", "55000", "58P01")  # no such slot or publication; slot invalidated; WAL removed


class StreamOwner(Protocol):
    """Callbacks of the stream into its owner, the capture of the database."""

    def judge(self, identity: ServerIdentity, connection: Connection, point: TransactionEnd) -> str:
        """Return why the server does not continue at `point`; "" if it does."""

    def logged(self, part: Transaction, upto: int) -> None:
        """Record that a transaction, or a part of one, got its offsets, the last of them `upto`."""

    def passed(self, token: str, offset: int) -> None:
        """Record that a barrier was received after the change with `offset`."""

    def rewound(self, point: TransactionEnd) -> None:
        """Record that the changes after `point` will be sent again."""

    def arrived(self) -> None:
        """Wake capture: there are changes to follow, or an error to report."""


class Stream:
    """The reader thread of a slot, from `start` to `stop`."""

    def __init__(
        self,
        server: Server,
        slot: str,
        publication: str,
        held: ReplicationBuffer,
        keeper: StreamOwner,
        *,
        all_tables: bool,
        born_published: Collection[int] = (),
        folder: Path | None = None,
    ) -> None:
        """Create the thread; `folder` gets unfinished transactions that exceed memory, None: a temporary folder."""
        self._spill = partial(FileSpill, folder)
        self.server, self._slot, self._publication = server, slot, publication
        self.held, self.keeper, self._all_tables = held, keeper, all_tables
        self._born_published = born_published
        self.error: HeadwaterError | None = None  # why there is no connection now
        self.error_since = 0.0
        self._repeats, self._is_told = LogThrottle(), False  # a server that restarts repeatedly does not flood the log
        self.lost: SourceMismatch | None = None  # why the stream cannot continue
        self.idle = 0  # an LSN up to which nothing is pending, as far as this connection has shown
        self.is_asked = False  # whether the server waits for this confirmation
        self.sessions = 0  # connections made
        self.confirmed = 0  # the LSN that the server may discard up to, once this connection has shown it
        self.delivered = 0  # whole transactions received
        self.stopping = threading.Event()
        self.wake_in, self._wake_out = socket.socketpair()
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"headwater-stream-{server.name}", daemon=True)

    def start(self) -> None:
        """Start the thread at the point where `held` ends."""
        logger.info("rows of %s are decoded by the %s decoder", self.server.name, row_decoder.twin().name)
        self._thread.start()

    def stop(self) -> None:
        """End the connection and the thread. Call it once."""
        self.stopping.set()
        self.held.end()
        self.wake()
        if self._thread.is_alive():
            self._thread.join()
        self.wake_in.close()
        self._wake_out.close()

    def wake(self) -> None:
        """Wake the thread, which then checks whether to stop, restart or confirm."""
        with contextlib.suppress(OSError):  # enough wake-ups are queued, or the stream has stopped
            self._wake_out.send(b"x")

    def give_up(self, reason: str) -> None:
        """Mark the stream as lost for `reason`, which the caller found: changes are missing."""
        self.lost = SourceMismatch(reason, hint="Readers need a new snapshot.")
        self.keeper.arrived()

    def confirm(self, lsn: int) -> None:
        """Let the server discard everything up to `lsn`."""
        if lsn > self.confirmed:
            self.confirmed = lsn
            self.wake()

    # --- connections -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        delay, longest = BACK_OFF
        while not self.stopping.is_set():
            delivered, began = self.delivered, time.monotonic()
            try:
                self._session()
            except SourceMismatch as error:
                self.lost = error
                self.keeper.arrived()
                return
            except (HeadwaterError, psycopg.Error, OSError) as error:
                self._fail(error)
            except Exception as error:
                logger.exception("the stream of %s failed", self.server.name)
                self._fail(SourceError(f"internal: {type(error).__name__}"))
            went_well = self.delivered > delivered or time.monotonic() - began > longest
            delay = BACK_OFF[0] if went_well else min(delay * 2, longest)
            if self.error is not None or not self.held.wants_back:
                self.stopping.wait(delay)

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, HeadwaterError):
            error = SourceError(f"the connection to {self.server.name!r} was lost: {' '.join(str(error).split())}")
        if self.error is None:
            self.error_since = time.monotonic()
            left_out = self._repeats.again("stopped", self.error_since)
            self._is_told = left_out is not None
            if left_out is not None:
                logger.warning("the stream of %s stopped: %s", self.server.name, counted(error.message, left_out))
        self.error = error
        self.keeper.arrived()

    def _session(self) -> None:
        """Run a connection until it breaks or is no longer wanted."""
        side = self.server.connect(statement_timeout="60000")
        wire: PGconn | None = None
        assembly: Assembly | None = None
        try:
            wire = self.server.replicate()
            if side.execute("SELECT pg_is_in_recovery()").fetchone() == (True,):
                raise SourceError(f"{self.server.name!r} is a standby, or still recovering", hint="Headwater retries.")
            point = self.held.rewind()
            self.keeper.rewound(point)
            self.idle = 0  # before the server is judged: see Attachment.save
            reason = self.keeper.judge(identify(wire), side, point)
            if reason:
                raise SourceMismatch(reason, hint="Readers need a new snapshot.")
            self.confirmed = self.held.durable_position
            catalog = CatalogReader(side, self._born_published)
            relations = Relations(point.shapes, catalog, truncated=point.truncated, all_tables=self._all_tables)
            side.execute("SET idle_session_timeout = 0")  # used when a table changes, which may be days later
            pace = self._pace(side)
            self._begin(wire, side.info.server_version)
            slot = find_slot(side, self._slot)  # the slot is active for us: nobody else moves it
            reported = 0 if slot is None else slot.confirmed
            # The last transaction of the log serves as proof, if the server will send it again.
            resume = LogEnd(point.position, proof=point.xid if reported < point.position else "")
            assembly = Assembly(relations, self._spill, resume=resume)
            self.sessions += 1
            if self.error is not None and self._is_told:
                logger.info("the stream of %s goes on", self.server.name)
            self.error = None
            _ConnectionLoop(self, wire, assembly, relations, pace, reported).run()
        finally:
            self.held.end()
            if assembly is not None:
                assembly.close()
            if wire is not None:
                wire.finish()
            side.close()

    def _pace(self, side: Connection) -> StreamTiming:
        row = side.execute("SELECT setting::int FROM pg_settings WHERE name = 'wal_sender_timeout'").fetchone()
        return pace_for(row[0] / 1000 if row is not None else 0)

    def _begin(self, wire: PGconn, version: int) -> None:
        protocol = 4 if version >= 160000 else 3 if version >= 150000 else 2
        result = wire.exec_(
            f"START_REPLICATION SLOT {self._slot} LOGICAL 0/0 (proto_version '{protocol}', streaming 'on', "
            f"messages 'true', publication_names '\"{self._publication}\"')".encode()
        )
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise _fatal(wire_error(result, f"the slot {self._slot}"))


def _fatal(error: HeadwaterError) -> HeadwaterError:
    """Return a SourceMismatch for an error that no retry can fix; any other error unchanged."""
    if error.extra.get("sqlstate") in GONE:
        return SourceMismatch(error.message, hint="Readers need a new snapshot.")
    return error


class StreamTiming(msgspec.Struct, frozen=True):
    """Seconds: the longest interval between our status updates, and the longest silence of the server."""

    interval: float
    silence: float


def pace_for(timeout: float) -> StreamTiming:
    """Return the timing for a server with this `wal_sender_timeout`; 0: none. While the server skips a transaction that
    it does not send, it reads our updates only after half of the timeout."""
    return StreamTiming(
        min(STATUS_SECONDS, timeout / 3) if timeout else STATUS_SECONDS, max(SILENCE_SECONDS, 2 * timeout)
    )


class _Disconnect(Exception):
    """The signal that this connection is no longer wanted."""


class _ConnectionLoop:
    """The loop of a running connection. `reported` is the LSN that the server last received."""

    def __init__(
        self, owner: Stream, wire: PGconn, assembly: Assembly, relations: Relations, pace: StreamTiming, reported: int
    ) -> None:
        self._owner, self._connection, self._assembly, self._relations = owner, wire, assembly, relations
        self._held, self._keeper, self._reported_lsn = owner.held, owner.keeper, reported
        self._interval, self._silence = pace.interval, pace.silence
        self._weighed = self._changed = 0
        self._shown = 0  # the LSN up to which the server reports to have sent everything
        self._reported_at = self._heard_at = time.monotonic()
        self._wire = wire_of(wire, owner.server.name)
        self._poll = select.poll()
        self._poll.register(self._wire.socket, select.POLLIN)
        self._poll.register(owner.wake_in.fileno(), select.POLLIN)

    def run(self) -> None:
        """Run until the connection breaks or another one is wanted."""
        with contextlib.closing(self._wire), contextlib.suppress(_Disconnect):
            while not self._is_over():
                for _ in range(FRAMES):
                    size, data = self._assembly.take(self._wire.get)
                    if size <= 0:
                        break
                    self._frame(data)
                else:
                    self._heard_at = time.monotonic()
                    self._send_status()
                    continue
                if size < 0 or self._wire.is_ended():
                    self._wire.close()
                    raise self._ended()
                self._wait()

    def _is_over(self) -> bool:
        return self._owner.stopping.is_set() or self._held.wants_back

    def _frame(self, data: memoryview) -> None:
        if data[0] == DATA:
            for item in self._assembly.feed(bytes(data[DATA_HEAD:])):
                self._take(item)
            return
        end, is_asked = decode_keepalive(bytes(data))
        self._shown = max(self._shown, end)
        self._rest(end)
        if is_asked:
            self._send_status(at_once=True)
            if self._owner.idle > self._owner.confirmed:  # a server that shuts down waits for our confirmation
                self._owner.is_asked = True
                self._keeper.arrived()

    def _take(self, item: Item) -> None:
        if isinstance(item, Barrier):
            self._keeper.passed(item.token, self._held.latest)
            return
        weight, self._weighed = self._assembly.weight - self._weighed, self._assembly.weight
        shapes = None
        if item.last and self._relations.changed != self._changed:
            known = self._relations
            self._changed = known.changed
            shapes = Shapes(dict(known.tables), dict(known.oids), dict(known.versions), known.displaced, known.secret)
        upto = self._held.put(item, weight, shapes, self._relations.truncated)
        self._owner.delivered += item.last
        self._keeper.logged(item, upto)
        if item.last or not self._held.has_room:
            self._keeper.arrived()
        while not (self._held.has_room or self._held.wait_for_room(self._interval / 2)):
            self._send_status()
            self._heard_at = time.monotonic()  # we did not read from the connection
            if self._is_over():
                raise _Disconnect

    def _rest(self, end: int) -> None:
        """Record that the server has sent everything up to `end`; if nothing is pending, none of it is needed."""
        if self._assembly.is_idle and self._held.durable == self._held.latest:
            self._owner.idle = max(self._owner.idle, end, self._assembly.end)

    def _wait(self) -> None:
        """Wait until data is received, another thread wakes this one, or a status update is due."""
        left = self._reported_at + self._interval - time.monotonic()
        for fd, _ in self._poll.poll(max(left, 0) * 1000):
            if fd == self._owner.wake_in.fileno():
                self._owner.wake_in.recv(4096)
            else:
                self._heard_at = time.monotonic()
                self._wire.read()
        self._send_status()

    def _send_status(self, *, at_once: bool = False) -> None:
        """Send the safe LSN if it advanced or an update is due. Never a lower one: the slot would go back."""
        now, lsn = time.monotonic(), self._reported_lsn
        if self._assembly.is_proven:
            lsn = max(lsn, min(self._owner.confirmed, max(self._shown, self._assembly.end)))
        due = now - self._reported_at >= self._interval
        if not (at_once or due or lsn > self._reported_lsn):
            return
        if now - self._heard_at > self._silence and self._held.has_room:
            raise SourceError(f"{self._owner.server.name!r} has not answered for {self._silence:.0f} seconds")
        self._wire.send(status_update(lsn, now_ms=wall_ms(), reply=due))
        self._reported_lsn, self._reported_at = lsn, now

    def _ended(self) -> HeadwaterError:
        result = self._connection.get_result()
        if result is None or result.status == pq.ExecStatus.COMMAND_OK:
            return SourceError(f"{self._owner.server.name!r} ended the stream")
        return _fatal(wire_error(result, f"the stream of {self._owner.server.name!r}"))
