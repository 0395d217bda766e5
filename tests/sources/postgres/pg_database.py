"""A database with its real stream, read as far as a test needs: offsets of transactions, for reads and writes."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from typing import Any, cast

from tests.sources.postgres.pg_server import Stream
from tests.suite.deadlines import PATIENCE

from headwater.model.change import Op, Transaction
from headwater.sources.postgres.capture.log_positions import Positions
from headwater.sources.postgres.connection import Server
from headwater.sources.postgres.protocol_session import Pool
from headwater.sources.postgres.query.analysis.analysis import Analyses
from headwater.sources.postgres.query.caller_connections import Callers
from headwater.sources.postgres.query.queries import PostgresQueries
from headwater.sources.postgres.read.key_order_page import Decoded, Take
from headwater.sources.postgres.read.reads import PostgresReads
from headwater.sources.postgres.schema.column_probe import Columns
from headwater.sources.postgres.schema.table_shapes import Shapes
from headwater.sources.postgres.settings import PostgresConfig
from headwater.sources.postgres.setup.logins import Logins
from headwater.sources.postgres.write.interactive_transaction import PostgresTx
from headwater.sources.postgres.write.writer import Writers
from headwater.sources.write import Result


class Log:
    """The log of the tests: every barrier reads the stream to its end. Implements Positions and SnapshotOffsets."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._assembly = stream, stream.assembly()
        self._lock = threading.RLock()
        self.transactions: list[Transaction] = []
        self.head = 0
        self._last: dict[int, int] = {}
        self._tables: dict[int, dict[str, int]] = {}

    def barrier(self) -> int:
        with self._lock:
            for item in self._stream.items(self._assembly):
                if isinstance(item, Transaction):
                    self._take(item)
            return self.head

    def _take(self, item: Transaction) -> None:
        self.transactions.append(item)
        tables = self._tables.setdefault(int(item.id), {})
        for change in item.changes:
            self.head += 1
            tables[change.table.name] = self.head
        self._last[int(item.id)] = self.head

    def wait_for(self, xid: int, timeout: float) -> int | None:
        self.barrier()
        return self._last.get(xid & 0xFFFFFFFF)

    def changes_of(self, xid: int) -> dict[str, int]:
        return self._tables[xid & 0xFFFFFFFF]

    def expect(self, xid: int) -> None:
        pass

    def reading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def seen(self, snapshot: str) -> int:
        self.barrier()
        found = takewhile(lambda item: self._sees(int(item.id), snapshot), self.transactions)
        return max((self._last[int(item.id)] for item in found), default=0)

    def exact(self, snapshot: str) -> int | None:
        self.barrier()
        seen = [self._sees(int(item.id), snapshot) for item in self.transactions]
        return self.seen(snapshot) if seen == sorted(seen, reverse=True) else None

    @staticmethod
    def _sees(xid: int, snapshot: str) -> bool:
        low, high, running = snapshot.split(":")
        return xid < int(low) or (xid < int(high) and str(xid) not in running.split(","))

    def ops(self) -> list[str]:
        """Read the stream up to now; return the ops of row changes since the last call."""
        self.barrier()
        found = [c.op.name.lower() for t in self.transactions for c in t.changes if c.op != Op.SCHEMA_CHANGE]
        self.transactions.clear()
        return found


class Rig:
    """The parts that read and write, on one database."""

    def __init__(self, stream: Stream, take: Take = Decoded, **options: Any) -> None:
        self.stream, self.log = stream, Log(stream)
        self.connect = lambda: stream.server.connect(stream.name)
        self.pool = Pool(self.connect)
        self.shapes = Shapes()
        self.columns = Columns(self.pool)
        self.reading = PostgresReads(self.pool, self.pool, self.shapes, self.log, self.columns, take=take)
        analyses = Analyses(self.pool, cast(Positions, self.log), "publication")
        callers = Callers(Logins(Server("rig", "postgresql://"), PostgresConfig()), self.pool, seconds=30.0)
        self.queries = PostgresQueries(callers, analyses, self.log, seconds=30.0)
        self.writers = Writers(lambda role: self.connect(), self.shapes, self.log, **options)
        self._open: set[PostgresTx] = set()

    def run(self, sql: str, args: Any = ()) -> Result:
        """Run one statement in its own transaction."""
        return self.writers.submit(lambda session: session.execute(sql, args)).result(PATIENCE).value

    def do(self, work: Callable[..., Any]) -> Any:
        """Run work in its own transaction."""
        return self.writers.submit(work).result(PATIENCE).value

    def begin(self, *, read_only: bool = False, seconds: float = 20.0, idle: float = 20.0) -> PostgresTx:
        tx = PostgresTx(self.connect, self.shapes, self.log, read_only=read_only, seconds=seconds, idle_seconds=idle)
        self._open.add(tx)
        return tx

    def close(self) -> None:
        for tx in self._open:
            tx.expire()
        self.writers.close()
        self.pool.close()
