"""Client: what a Headwater server offers to a reader, as plain calls and iterators."""

from __future__ import annotations

import os
import random
import ssl
import time
from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from headwater.client.arrow_stream import Kept, read_batches
from headwater.client.http_connections import Connections
from headwater.client.protocol import may_repeat, ranges_of, read, rpc_request, rpc_result
from headwater.client.pull_state import Pull
from headwater.client.request_base import Asking, check_follow, page_of
from headwater.client.responses import Described, Page, Range, Registered, Subscribed
from headwater.client.sse import Feed, Following
from headwater.errors import HeadwaterError, OffsetExpired
from headwater.model.keys.key import Span

if TYPE_CHECKING:
    import pyarrow as pa


class Client:
    """One server. Cheap; keeps its connections open until `close`; one per thread.

    What fails in a way that passes (no connection, 503, 429, a body that breaks off) is tried again, with jitter,
    until `patience` seconds went by without progress; then the last error is raised. Writes are sent again only
    when it is sure that they were not done.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        token_file: str | os.PathLike[str] | None = None,
        timeout: float = 60.0,
        patience: float = 60.0,
        random: random.Random | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._asking = Asking(url, token, token_file, patience, random)
        self._connections = Connections(self._asking.server, self._asking.token, timeout, tls)

    def __repr__(self) -> str:
        return f"Client({self._asking.server.url!r})"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the connections go."""
        self._connections.close()

    # --- calls -------------------------------------------------------------------------------------------

    def call(self, method: str, **params: Any) -> Any:
        """The result of an RPC method; its error is raised as the class with its code."""
        request = rpc_request(method, params)
        tries = self._asking.patience()
        while True:
            try:
                return rpc_result(*self._connections.exchange(request))
            except HeadwaterError as error:
                if not may_repeat(request.repeat, error):
                    raise
                wait = tries.wait(error)
            time.sleep(wait)

    def describe(
        self,
        db: str,
        table: str,
        after: int | None = None,
        wait_ms: int = 0,
        shape: int | None = None,
        step: tuple[int, int] | None = None,
    ) -> Described:
        """The table's shape and where its log stands; with `after` and `wait_ms`, once there is something newer.

        With `step`, so many changes and bytes, also where a step after `after` of that size ends.
        """
        rows, size = step or (None, None)
        asked = {"after": after, "wait_ms": wait_ms or None, "shape": shape, "step_rows": rows, "step_bytes": size}
        return read(self.call("pull.describe", db=db, table=table, **asked), Described)

    def ranges(self, db: str, table: str, target_bytes: int | None = None) -> list[Range]:
        """The table cut into ranges, in key order."""
        return ranges_of(self.call("pull.ranges", db=db, table=table, target_bytes=target_bytes)["ranges"])

    def register(
        self,
        db: str,
        table: str,
        subscriber: str,
        range: int | None = None,
        epoch: int | None = None,
        keep: int | None = None,
    ) -> Registered:
        """A version to read, and a lease that keeps the log after it, or after `keep`; again to renew it."""
        asked = {"subscriber": subscriber, "range": range, "epoch": epoch, "keep": keep}
        return read(self.call("pull.register", db=db, table=table, **asked), Registered)

    def release(self, db: str, table: str, subscriber: str) -> None:
        """Give the lease back."""
        self.call("pull.release", db=db, table=table, subscriber=subscriber)

    # --- bulk --------------------------------------------------------------------------------------------

    def snapshot(
        self,
        db: str,
        table: str,
        *,
        version: str | None = None,
        span: Span | None = None,
        columns: Sequence[str] = (),
        where: str | None = None,
        ranges: Sequence[Range] = (),
    ) -> Generator[pa.RecordBatch]:
        """Rows in key order, all as of `version` (now, unless given): every row once, whatever breaks meanwhile.

        With `ranges` it asks range by range; they must cover the span. There is at least one batch, an empty one
        when there are no rows.
        """
        version = version or self.describe(db, table).version
        yield from self._batches(self._asking.snapshot(db, table, version, span or Span.all(), columns, where, ranges))

    def log(
        self,
        db: str,
        table: str,
        *,
        generation: str,
        after: int,
        upto: int,
        span: Span | None = None,
        shape: int | None = None,
        columns: Sequence[str] = (),
        where: str | None = None,
    ) -> Generator[pa.RecordBatch]:
        """Changes in (after, upto], every one once, fitted to the shape `shape` or that of the first answer."""
        return self._batches(self._asking.log(db, table, generation, after, upto, span, shape, columns, where))

    def log_tables(
        self, db: str, tables: Sequence[str], *, generation: str, after: int, upto: int
    ) -> Generator[pa.RecordBatch]:
        """Changes of several tables, of all when none is named, in (after, upto]; rows are JSON here."""
        return self._batches(self._asking.log_tables(db, tables, generation, after, upto))

    def _batches(self, pull: Pull) -> Generator[pa.RecordBatch]:
        kept = Kept()
        while (request := pull.next()) is not None:
            try:
                with self._connections.opened(request) as body:
                    for told in read_batches(body.read):
                        pull.took(told)
                        yield from kept.rows(told)
                    body.drain()
                pull.finished()
                continue
            except HeadwaterError as error:
                wait = pull.failed(error)
            time.sleep(wait)
        yield from kept.rest()

    # --- feeds -------------------------------------------------------------------------------------------

    def subscribe_table(self, **options: Any) -> Subscribed:
        """A subscription that the server remembers, by the fields of `cdc.subscribe_table`."""
        return read(self.call("cdc.subscribe_table", **options), Subscribed)

    def poll(
        self,
        sub_id: str,
        *,
        from_offset: int | None = None,
        cursor: str | None = None,
        limit: int | None = None,
        wait_ms: int = 0,
    ) -> Page:
        """A page of changes; with `wait_ms` an empty one comes only after that time. OffsetExpired: place lost."""
        asked = {"from_offset": from_offset, "cursor": cursor, "limit": limit, "wait_ms": wait_ms or None}
        return page_of(self.call("cdc.poll", sub_id=sub_id, **asked))

    def ack(self, sub_id: str, offset: int | None = None, *, cursor: str | None = None) -> int:
        """Everything up to `offset` was dealt with; the offset that is acked now."""
        return int(self.call("cdc.ack", sub_id=sub_id, offset=offset, cursor=cursor)["acked_offset"])

    def stream(
        self, sub_id: str, *, from_offset: int | None = None, control: Collection[str] = ()
    ) -> Generator[dict[str, Any]]:
        """The changes of a subscription as they are committed; it does not ack."""
        return self._told(self._asking.stream(sub_id, from_offset, control))

    def changes(
        self, db: str, table: str | None = None, *, control: Collection[str] = (), **filters: Any
    ) -> Generator[dict[str, Any]]:
        """Changes as they are committed, for ever or through `upto`, by the parameters of /api/v1/changes.

        Connections that break are taken up where they broke. `control` names the control events to be told too:
        objects with `event`, `id` and `data`.
        """
        return self._told(self._asking.changes(db, table, control, filters))

    def follow(self, db: str, table: str, **filters: Any) -> Generator[tuple[str, Any]]:
        """("row", row) for every row there is, then ("change", change) for ever, with no gap and no repeat.

        ("resnapshot", reason): forget what came before; all rows follow again.
        """
        check_follow(filters)
        tries = self._asking.patience()
        while True:
            following = Following()
            try:
                with closing(self._told(self._asking.changes(db, table, (), {**filters, "start": "snapshot"}))) as feed:
                    for told in feed:
                        tries.progress()
                        yield from following.sort(told)
                        if following.restart:
                            break
                yield "resnapshot", following.restart
                continue
            except OffsetExpired as error:
                wait, reason = tries.wait(error), error.extra.get("resnapshot_reason") or error.code
            yield "resnapshot", reason
            time.sleep(wait)

    def _told(self, feed: Feed) -> Generator[dict[str, Any]]:
        while (request := feed.next()) is not None:
            try:
                with self._connections.opened(request) as body:
                    for piece in body.pieces():
                        yield from feed.take(piece)
                wait = feed.finished()
            except HeadwaterError as error:
                wait = feed.failed(error)
            time.sleep(wait)
