"""The state of a table and its durable log: newest offset, schema changes, and step ends."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec

from headwater.database import Database
from headwater.errors import HeadwaterError, NotFound, Unavailable
from headwater.log.live.live_log import LiveLog
from headwater.model.change import Op
from headwater.model.principal import Principal
from headwater.model.table import Table
from headwater.ranges.captured_table import captured_table

CATCH_UP_SECONDS = 0.25  # longest wait until the log has the commits from before the request
SCHEMA_SECONDS = 5.0  # longest wait until the log has a schema change that the source already shows
ATTEMPTS = 5  # retries after concurrent schema changes


class Described(msgspec.Struct, frozen=True):
    """A table and the state of its durable log."""

    db: str
    table: Table
    generation: str
    horizon: int
    latest: int
    table_latest: int  # offset of the table's last change up to `latest`; if that is evicted, an upper bound
    caught_up: bool  # whether the log holds every commit from before the request
    closed: int  # a time that all changes after `latest` exceed; 0 if none is known
    schema_changed_at: int | None = None
    changed_to: Table | None = None  # the table version after that change
    resnapshot: bool = False
    step_upto: int | None = None
    remedy: str = ""  # how to make the source send full rows, if it does not


class Step(NamedTuple):
    """The approximate amount of a table's changes that a reader reads at a time."""

    changes: int
    bytes: int


class ChangedTables(msgspec.Struct, frozen=True):
    """The state of a durable log, and the tables that changed after given offsets."""

    generation: str
    horizon: int
    latest: int
    changed: dict[str, int]  # offset of the last change, by table


def wait_for_status(database: Database, who: Principal, db: str, table: str) -> Described:
    """Return the table and the state of its log, after a short wait for commits from before this call."""
    caught_up = database.catch_up(CATCH_UP_SECONDS)
    try:
        return read_status(database, who, db, table, caught_up=caught_up)
    except NotFound as error:
        if caught_up:
            raise
        raise Unavailable(f"{error.message} yet: the log is behind its database", hint="Retry in a moment.") from None


def read_status(
    database: Database,
    who: Principal,
    db: str,
    table: str,
    status: Described | None = None,
    *,
    caught_up: bool = True,
) -> Described:
    """Return a table version and an end of the log that are consistent, without a wait for earlier commits.

    If the table changed in between, the end may be after the schema change, and readers would not notice it.
    `caught_up`: whether the log, with what is not durable yet, holds the earlier commits.
    """
    shape = captured_table(database.source, table, who, db)  # after the catch-up, which applies DDL of other programs
    for _ in range(ATTEMPTS):
        found = _described(database, db, shape, status, caught_up)
        was, shape = shape, captured_table(database.source, table, who, db)
        if shape == was:
            return found
    raise Unavailable(f"the schema of {table!r} keeps changing", hint="Retry.")


def _described(database: Database, db: str, shape: Table, status: Described | None, caught_up: bool) -> Described:
    log, latest = database.log, database.log.latest
    (closed, at), generation = log.closed, log.generation
    if status is None:
        with suppress(HeadwaterError):  # the disk may be full: report the state of the durable log anyway
            log.flush()
        remedy = database.source.remedy(shape.name)
    else:
        remedy = status.remedy
    closed = closed if at <= log.durable else status.closed if status is not None else 0
    durable = log.durable
    return Described(
        db,
        shape,
        generation,
        log.horizon,
        durable,
        min(log.last_of(shape.name), durable),
        caught_up and durable >= latest,
        closed,
        remedy=remedy,
    )


def changed_tables(log: LiveLog, offsets: Mapping[str, int]) -> ChangedTables:
    """Return the tables whose last change is after their offset in `offsets`."""
    generation, horizon, durable = log.generation, log.horizon, log.durable
    ends = {table: log.last_of(table) for table in offsets}
    changed = {table: end for table, end in ends.items() if end > offsets[table]}
    return ChangedTables(generation, horizon, durable, changed)


def find_change(database: Database, who: Principal, status: Described, after: int) -> Described:
    """Return `status` with the first schema change of the table after `after`, if there is one.

    The source shows a new schema before the log has the change: if the log has none, wait for the log and search again.
    """
    found = _first_change(database.log, status, after)
    if found.schema_changed_at is None:
        caught_up = database.catch_up(SCHEMA_SECONDS)
        now = read_status(database, who, status.db, status.table.name, caught_up=caught_up)
        if now.latest > status.latest:
            return _first_change(database.log, now, after)
    return found


def _first_change(log: LiveLog, status: Described, after: int) -> Described:
    for part in log.scan(after=after, upto=max(status.latest, after), table=status.table.name):
        for number, change in enumerate(part.changes):
            if change.op is Op.SCHEMA_CHANGE and change.table.name == status.table.name:
                at, to = part.first + number, change.table
                return msgspec.structs.replace(
                    status, schema_changed_at=at, changed_to=to, resnapshot=change.resnapshot
                )
    return status


def find_end(log: LiveLog, status: Described, after: int, step: Step) -> Described:
    """Return `status` with the end offset of a step of that size after `after`."""
    end = log.reach(after, changes=step.changes, bytes=step.bytes, table=status.table.name)
    return msgspec.structs.replace(status, step_upto=min(end, status.latest))
