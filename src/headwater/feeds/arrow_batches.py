"""Streams of one table's changes as Arrow record batches, for readers that load them into data frames."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from headwater.errors import NotFound, OffsetExpired
from headwater.feeds.deliver.consumer import Consumer
from headwater.feeds.deliver.end_reason import CLOSED, STOPPING, EndReason
from headwater.feeds.deliver.hub_wait import HubWait
from headwater.feeds.filters.filter import ROW_OPS
from headwater.model import arrow
from headwater.model.change import Op, image_bytes
from headwater.model.table import Table

ROWS = 16_384  # changes in one batch
BATCH_BYTES = 4 << 20  # approximate bytes of texts and blobs in one batch: rows may be of any size
SCAN = 65_536
PATIENCE_SECONDS = 15.0  # after this time without a change an empty batch keeps the connection alive


class Batches:
    """Yields the pieces of one Arrow IPC stream, which ends properly where the columns of the table change."""

    def __init__(self, consumer: Consumer, *, cursor: int, upto: int | None) -> None:
        self.consumer, self.cursor, self._upto = consumer, cursor, upto
        self.ending: EndReason | None = None
        self.deliveries = 0
        self._table: Table | None = None
        self._stream: arrow.ArrowStream | None = None
        self._waiting = HubWait(consumer.hub, consumer.view)

    async def next(self) -> bytes | None:
        """Return the next piece; None at the end. Raises OffsetExpired, because Arrow IPC has no control events."""
        while self.ending is None:
            if reason := self.consumer.why_lost(self.cursor):
                log = self.consumer.log
                raise OffsetExpired(self.cursor, log.horizon, log.latest) from RuntimeError(reason)
            if self._upto is not None and self.cursor >= self._upto:
                self._end("complete", "everything asked for was sent")
                break
            before = self.cursor
            if piece := await self._piece(self._read):
                return piece
            if self.cursor == before and self.ending is None:
                slept = time.monotonic()
                self.cursor = await self._waiting.beyond(self.cursor, PATIENCE_SECONDS)
                if time.monotonic() - slept >= PATIENCE_SECONDS:
                    return await self._piece(self._batch, [])
        return await self._piece(self._last)

    async def _piece(self, call: Callable[..., bytes | None], *args: Any) -> bytes | None:
        made: bytes | None = await self.consumer.run(call, *args)
        return made

    def _read(self) -> bytes:
        """Return one batch of changes after the cursor that pass, b"" if none do. Blocks: call it in a thread."""
        upto = min(self.consumer.log.latest, self.cursor + SCAN, self._upto or 2**63)
        found: list[arrow.Delivered] = []
        size = 0
        while self.cursor < upto and len(found) < ROWS:
            parts = self.consumer.log.read(after=self.cursor, upto=upto)
            if not parts:
                break
            for part in parts:
                for place, op in enumerate(self.consumer.view.filter.decide(part.changes)):
                    change = part.changes[place]
                    if op is not None and not self._fits(change.table, op, begun=bool(found or self._stream)):
                        self.cursor = part.first + place - 1
                        self.ending = EndReason("schema_changed", "the table has another shape from here on")
                        return self._batch(found) if found else b""
                    if op in ROW_OPS:
                        found.append((part, part.first + place, change, op))
                        size += image_bytes((change,))
                        if size >= BATCH_BYTES:
                            self.cursor = part.first + place
                            return self._batch(found)
                self.cursor = part.upto
        return self._batch(found) if found else b""

    def _fits(self, table: Table, op: Op, *, begun: bool) -> bool:
        """Return whether the stream can carry a change of `table`; before it has begun, any columns fit."""
        if self._table is None or not begun:
            self._table = table
            return True
        return op in ROW_OPS and (table is self._table or table.columns == self._table.columns)

    def _batch(self, found: list[arrow.Delivered]) -> bytes:
        if self._table is None:
            (name,) = self.consumer.view.options.tables
            self._table = self.consumer.database.source.describe().get(name)
            if self._table is None:
                raise NotFound(f"table {name!r} was dropped", hint="Close the stream, or create the table again.")
        start = b""
        if self._stream is None:
            self._stream = arrow.ArrowStream(arrow.changes_schema(self._table))
            start = self._stream.start()
        self.deliveries += len(found)
        return start + self._stream.batch(arrow.changes_batch(self._table, found))

    def _last(self) -> bytes | None:
        """Return the end of the stream, once; a stream without a batch gets an empty batch first."""
        if self.ending is None or self.ending.code == "over":
            return None
        start = self._batch([]) if self._stream is None else b""
        assert self._stream is not None
        self.ending = EndReason("over", self.ending.message)
        return start + self._stream.end()

    # --- from outside, in the loop -----------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the stream because the server stops."""
        self._end(STOPPING, "the server is stopping")

    def leave(self) -> None:
        """End the stream because its reader left."""
        self._end(CLOSED, "the reader left")

    def changed(self) -> None:
        """End the stream if its database was dropped."""
        if self.consumer.closed:
            self._end(CLOSED, "the database was dropped")

    def ready(self) -> bytes | None:
        """Return None: `next` must always be called."""
        return None

    def news(self) -> asyncio.Future[None]:
        """Not called, because `ready` never has frames."""
        raise NotImplementedError

    def is_due(self, now: float) -> bool:
        """Return False: nothing is due by the clock."""
        return False

    def tick(self, now: float) -> None:
        """Do nothing: nothing is due by the clock."""

    def close(self) -> None:
        """Do nothing: the stream holds no resources."""

    def _end(self, code: str, message: str) -> None:
        if self.ending is None:
            self.ending = EndReason(code, message)
        self._waiting.wake()
