"""Writes to a PostgreSQL database: queued transactions of one call, and interactive ones."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from headwater.model.principal import OWNER
from headwater.sources.postgres.abandoned_statements import AbandonedStatements
from headwater.sources.postgres.capture.log_positions import Positions
from headwater.sources.postgres.protocol_session import Link
from headwater.sources.postgres.schema.table_shapes import Shapes
from headwater.sources.postgres.settings import PostgresConfig
from headwater.sources.postgres.setup.logins import Logins
from headwater.sources.postgres.write.interactive_transaction import PostgresTx
from headwater.sources.postgres.write.writer import Writers
from headwater.sources.write import Work, Writable, WriteResult

T = TypeVar("T")


class PostgresWrites(Writable):
    """The writes of a source. `publish` publishes the tables that a transaction created."""

    def __init__(
        self,
        logins: Logins,
        shapes: Shapes,
        positions: Positions,
        publish: Callable[[Link], None],
        *,
        config: PostgresConfig,
        abandoned: AbandonedStatements,
    ) -> None:
        def begin(role: str, read_only: bool) -> PostgresTx:
            return PostgresTx(
                logins.server(role).connect,
                shapes,
                positions,
                read_only=read_only,
                seconds=config.tx_seconds,
                idle_seconds=config.tx_idle_seconds,
                statement_seconds=config.statement_seconds,
                finished=self._transactions.discard,
                abandoned=abandoned,
                is_trusted=role == OWNER,
                grants=logins.grants,
            )

        self._transactions: set[PostgresTx] = set()
        self._begin = begin
        self._writers = Writers(
            lambda role: logins.server(role).connect(),
            shapes,
            positions,
            statement_seconds=config.statement_seconds,
            abandoned=abandoned,
            grants=logins.grants,
            publish=publish,
        )

    def write(self, work: Work[T], *, role: str = OWNER, caller: str = "") -> Future[WriteResult[T]]:
        """Run `work` in a transaction of its own; the future is done when capture has received the write."""
        return self._writers.submit(work, role, caller)

    def begin(self, *, read_only: bool = False, role: str = OWNER) -> PostgresTx:
        tx = self._begin(role, read_only)
        self._transactions.add(tx)
        return tx

    def finish_writes(self) -> None:
        for tx in list(self._transactions):
            tx.expire()
        self._writers.close()
