"""Results of calls as values: tables, ranges, leases, subscriptions, pages."""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.model.keys.key import Span
from headwater.model.keys.range import Range
from headwater.model.table import Table


class Described(msgspec.Struct, frozen=True):
    """A table and its log. `latest` is the newest durable offset: pulls return no newer change."""

    generation: str
    horizon: int
    latest: int
    table_latest: int  # offset of the table's last change up to `latest`; if that is evicted, an upper bound
    table: Table
    version: str  # `<generation>.<latest>`: the rows of this moment, for `snapshot`
    caught_up: bool = True  # whether `latest` holds every commit from before the request
    db: str = ""
    key: tuple[str, ...] = ()
    closed_ts: str | None = None
    schema_changed_at: int | None = None  # the first change of the shape after `after`, if the shape is another one
    changed_to: Table | None = None  # the shape since then; older servers do not send it
    resnapshot: bool = False  # rows may have changed with it without a change in the log
    step_upto: int | None = None  # the end of a step of the requested size, if possible of a transaction
    remedy: str = ""  # the SQL that makes the source send complete rows; "" if it does already


class ChangedTables(msgspec.Struct, frozen=True):
    """The offsets of a log, and the tables that changed after given offsets, with the offset of their last change."""

    generation: str
    horizon: int
    latest: int
    changed: dict[str, int] = {}


class Registered(msgspec.Struct, frozen=True, rename={"version": "init_snapshot_version"}):
    """A lease on the log: changes after offset `version` are kept until the lease ends; register again to renew it."""

    generation: str
    version: int
    lease_seconds: float = 0.0

    @property
    def snapshot_version(self) -> str:
        """Return the version at that offset, for `snapshot`."""
        return f"{self.generation}.{self.version}"


class Subscribed(msgspec.Struct, frozen=True):
    """A subscription that the server stores; changes after `offset` are delivered."""

    sub_id: str
    offset: int
    sse_url: str
    ws_url: str
    created: bool


class Page(msgspec.Struct, frozen=True, rename={"changes": "events"}):
    """The answer to a poll. While rows of a snapshot are read, `snapshot` holds `done` and `cursor`."""

    changes: list[dict[str, Any]]
    next_offset: int
    earliest_offset: int
    latest_offset: int
    caught_up: bool
    snapshot: dict[str, Any] | None = None
    backpressure: dict[str, Any] = {}


class WireRange(msgspec.Struct, frozen=True):
    """A range in JSON: keys in hex, an open end left out."""

    id: int
    epoch: int
    start: str = ""
    end: str | None = None
    rows: int = 0
    bytes: int = 0

    def read(self) -> Range:
        """Return the range with its keys as bytes."""
        end = None if self.end is None else bytes.fromhex(self.end)
        return Range(self.id, self.epoch, Span(bytes.fromhex(self.start), end), self.rows, self.bytes)
