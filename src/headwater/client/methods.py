"""The methods of both clients, written once: each returns a call or a transfer, which the client then carries out."""

from __future__ import annotations

import functools
import os
import ssl
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from random import Random
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from headwater.client.protocol import find_token, offset_expired, parse_url, ranges_of, reader
from headwater.client.pull_state import LogPull, RangeScan, SnapshotPull
from headwater.client.responses import ChangedTables, Described, Page, Registered, Subscribed
from headwater.client.retry import Backoff
from headwater.client.sse import Feed, Follow
from headwater.client.transfer import Call, Transfer
from headwater.model.formats import PLAIN
from headwater.model.keys.key import Span
from headwater.model.keys.range import Range

if TYPE_CHECKING:
    import pyarrow as pa

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Blocking = AbstractContextManager[Any]
Awaited = AbstractAsyncContextManager[Any]


class _CallMethod(Protocol[P, T_co]):
    """A method that returns its result, or a coroutine of it, depending on the client."""

    @overload
    def __get__(self, client: Blocking, kind: Any = None) -> Callable[P, T_co]: ...
    @overload
    def __get__(self, client: Awaited, kind: Any = None) -> Callable[P, Coroutine[Any, Any, T_co]]: ...


class _StreamMethod(Protocol[P, T_co]):
    """A method that returns a generator, or an asynchronous one, depending on the client."""

    @overload
    def __get__(self, client: Blocking, kind: Any = None) -> Callable[P, Generator[T_co]]: ...
    @overload
    def __get__(self, client: Awaited, kind: Any = None) -> Callable[P, AsyncGenerator[T_co]]: ...


def called(build: Callable[Concatenate[Any, P], Call[T]]) -> _CallMethod[P, T]:
    """Return a client's method that carries out the call which `build` returns."""

    @functools.wraps(build)
    def method(self: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        return self._carry_out(build(self, *args, **kwargs))

    return cast(_CallMethod[P, T], method)


def transferred(build: Callable[Concatenate[Any, P], Transfer[T]]) -> _StreamMethod[P, T]:
    """Return a client's method that carries out the transfer which `build` returns."""

    @functools.wraps(build)
    def method(self: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        return self._transfer(build(self, *args, **kwargs))

    return cast(_StreamMethod[P, T], method)


class Methods:
    """Base of both clients. A subclass has `_connect`, `_carry_out` for calls, and `_transfer`."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        token_file: str | os.PathLike[str] | None = None,
        timeout: float = 60.0,
        patience: float = 60.0,
        random: Random | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._server = parse_url(url)
        self._token = find_token(token, token_file, os.environ)
        self._seconds, self._jitter = patience, random or Random()
        self._connect(timeout, tls)

    def _connect(self, timeout: float, tls: ssl.SSLContext | None) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._server.url!r})"

    def _backoff(self) -> Backoff:
        return Backoff(self._seconds, self._jitter)

    # --- calls -------------------------------------------------------------------------------------------

    @called
    def describe(
        self,
        db: str,
        table: str,
        after: int | None = None,
        wait_ms: int = 0,
        shape: int | None = None,
        step: tuple[int, int] | None = None,
    ) -> Call[Described]:
        """Return the table's shape and the offsets of its log; with `after` and `wait_ms`, wait for a newer offset.

        With `step`, a number of changes and of bytes, also return where a step of that size after `after` ends.
        """
        rows, size = step or (None, None)
        asked = {"after": after, "wait_ms": wait_ms or None, "shape": shape, "step_rows": rows, "step_bytes": size}
        return Call("pull.describe", {"db": db, "table": table, **asked}, reader(Described))

    @called
    def changed_tables(self, db: str, after: Mapping[str, int], wait_ms: int = 0) -> Call[ChangedTables]:
        """Return the tables that changed after their offset in `after`; wait `wait_ms` for the first such change."""
        asked = {"db": db, "after": dict(after), "wait_ms": wait_ms or None}
        return Call("pull.changed_tables", asked, reader(ChangedTables))

    @called
    def ranges(self, db: str, table: str, target_bytes: int | None = None) -> Call[list[Range]]:
        """Return the ranges of the table, in key order."""
        asked = {"db": db, "table": table, "target_bytes": target_bytes}
        return Call("pull.ranges", asked, lambda found: ranges_of(found["ranges"]))

    @called
    def register(
        self,
        db: str,
        table: str,
        subscriber: str,
        range: int | None = None,
        epoch: int | None = None,
        keep: int | None = None,
    ) -> Call[Registered]:
        """Return a version to read, with a lease that keeps the log after it, or after `keep`; call again to renew."""
        asked = {"subscriber": subscriber, "range": range, "epoch": epoch, "keep": keep}
        return Call("pull.register", {"db": db, "table": table, **asked}, reader(Registered))

    @called
    def release(self, db: str, table: str, subscriber: str) -> Call[None]:
        """End the lease of `subscriber` on the log of the table."""
        return Call("pull.release", {"db": db, "table": table, "subscriber": subscriber}, lambda found: None)

    @called
    def subscribe_table(self, /, **options: Any) -> Call[Subscribed]:
        """Create a subscription that the server stores; `options` are the fields of `cdc.subscribe_table`."""
        return Call("cdc.subscribe_table", options, reader(Subscribed))

    @called
    def poll(
        self,
        sub_id: str,
        *,
        from_offset: int | None = None,
        cursor: str | None = None,
        limit: int | None = None,
        wait_ms: int = 0,
    ) -> Call[Page]:
        """Return a page of changes, after at most `wait_ms`; raise OffsetExpired if the log evicted the next ones."""
        asked = {"from_offset": from_offset, "cursor": cursor, "limit": limit, "wait_ms": wait_ms or None}
        return Call("cdc.poll", {"sub_id": sub_id, **asked}, _page)

    @called
    def ack(self, sub_id: str, offset: int | None = None, *, cursor: str | None = None) -> Call[int]:
        """Acknowledge everything up to `offset`; return the acknowledged offset."""
        asked = {"sub_id": sub_id, "offset": offset, "cursor": cursor}
        return Call("cdc.ack", asked, lambda found: int(found["acked_offset"]))

    # --- bulk --------------------------------------------------------------------------------------------

    @transferred
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
    ) -> Transfer[pa.RecordBatch]:
        """Yield batches of the rows in key order, as of `version` (default: now), each row once despite retries.

        With `ranges`, which must cover the span, rows are read range by range. There is at least one batch, an empty
        one when there are no rows.
        """
        query = {"version": version, "columns": list(columns) or None, "where": where}
        scan = RangeScan(span or Span.all(), ranges)
        pull = SnapshotPull(["pull", db, table, "snapshot"], query, scan, self._backoff())
        if not version:
            pull.question = Call("pull.describe", {"db": db, "table": table}, reader(Described))
        return pull

    @transferred
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
    ) -> Transfer[pa.RecordBatch]:
        """Yield batches of the changes in (after, upto], each once, all in the shape `shape` or of the first answer."""
        bounds: dict[str, Any] = {} if span is None else {"start": span.start or None, "end": span.end}
        query: dict[str, Any] = {"after": after, "upto": upto, "generation": generation, "shape": shape, **bounds}
        query |= {"columns": list(columns) or None, "where": where, "compression": "lz4"}
        return LogPull(["pull", db, table, "log"], query, self._backoff())

    @transferred
    def log_tables(
        self, db: str, tables: Sequence[str], *, generation: str, after: int, upto: int
    ) -> Transfer[pa.RecordBatch]:
        """Yield batches of the changes in (after, upto] of `tables` (empty: of all), with rows as JSON."""
        query: dict[str, Any] = {"tables": list(tables) or "*", "after": after, "upto": upto, "generation": generation}
        return LogPull(["pull", db, "log"], query, self._backoff())

    # --- feeds -------------------------------------------------------------------------------------------

    @transferred
    def stream(
        self, sub_id: str, *, from_offset: int | None = None, control: Collection[str] = ()
    ) -> Transfer[dict[str, Any]]:
        """Yield the changes of a subscription, for ever, as they are committed, without acknowledging them."""
        return Feed(["cdc", "sse", sub_id], {"from_offset": from_offset}, self._backoff(), control)

    @transferred
    def changes(
        self, /, db: str, table: str | None = None, *, control: Collection[str] = (), **filters: Any
    ) -> Transfer[dict[str, Any]]:
        """Yield changes as they are committed, for ever or through `upto`; `filters` are those of /api/v1/changes.

        A broken connection is resumed. Control events that `control` names are yielded too: objects with `event`, `id`
        and `data`.
        """
        return self._feed(db, table, control, filters)

    @transferred
    def follow(self, /, db: str, table: str, **filters: Any) -> Transfer[tuple[str, Any]]:
        """Yield ("row", row) for every current row, then ("change", change) for ever, with no gap and no repeat.

        ("resnapshot", reason): discard everything before; all rows follow again.
        """
        return Follow(lambda: self._feed(db, table, (), {**filters, "start": "snapshot"}), filters, self._backoff())

    def _feed(self, db: str, table: str | None, control: Collection[str], filters: dict[str, Any]) -> Feed:
        parts = ["changes", db] if table is None else ["changes", db, table]
        return Feed(parts, {"format": PLAIN, **filters}, self._backoff(), control)


def _page(found: Any) -> Page:
    if found.get("resnapshot_required"):
        raise offset_expired(found)
    return reader(Page)(found)
