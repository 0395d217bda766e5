"""Looking: a table, how far its durable log goes, and what in the log a reader must know of."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import msgspec

from headwater.database import Database
from headwater.errors import HeadwaterError, Unavailable
from headwater.log.live.live_log import LiveLog
from headwater.model.change import Op
from headwater.model.principal import Principal
from headwater.model.table import Table
from headwater.ranges.captured_table import captured_table

CATCH_UP_SECONDS = 0.25  # longest a look waits for what was committed before it
ATTEMPTS = 5  # against those who alter the table meanwhile


class Described(msgspec.Struct, frozen=True):
    """A table and how far its durable log goes."""

    db: str
    table: Table
    generation: str
    horizon: int
    latest: int
    closed: int  # whatever is read after `latest` has a later time; 0 when that is not known
    schema_changed_at: int | None = None
    changed_to: Table | None = None  # the shape it changed to there
    resnapshot: bool = False
    step_upto: int | None = None
    remedy: str = ""  # what makes the source tell whole rows, where it does not


class Step(NamedTuple):
    """How much a reader takes at a time, about."""

    changes: int
    bytes: int


def look(database: Database, who: Principal, db: str, table: str) -> Described:
    """The table, and the end of its log with what was committed before this call, if that comes soon."""
    database.catch_up(CATCH_UP_SECONDS)
    return _settled(database, who, db, table)


def look_again(database: Database, who: Principal, seen: Described) -> Described:
    """The same after a wait: nothing is waited for any more."""
    return _settled(database, who, seen.db, seen.table.name, seen)


def _settled(database: Database, who: Principal, db: str, table: str, seen: Described | None = None) -> Described:
    """A shape and an end of the log that belong together.

    If the shape changed in between, that end may lie beyond the change, and readers would pass it unseen.
    """
    shape = captured_table(database.source, table, who, db)  # after the catching up: that takes foreign DDL in
    for _ in range(ATTEMPTS):
        found = _described(database, db, shape, seen)
        was, shape = shape, captured_table(database.source, table, who, db)
        if shape == was:
            return found
    raise Unavailable(f"the shape of {table!r} changes all the time", hint="Try again.")


def _described(database: Database, db: str, shape: Table, seen: Described | None) -> Described:
    log = database.log
    (closed, at), generation = log.closed, log.generation
    if seen is None:
        with suppress(HeadwaterError):  # a full disk: what is durable can be told all the same
            log.flush()
        remedy = database.source.remedy(shape.name)
    else:
        remedy = seen.remedy
    closed = closed if at <= log.durable else seen.closed if seen is not None else 0
    return Described(db, shape, generation, log.horizon, log.durable, closed, remedy=remedy)


def find_change(log: LiveLog, seen: Described, after: int) -> Described:
    """`seen`, with the first change of the shape after `after`, if there is one."""
    for part in log.scan(after=after, upto=max(seen.latest, after)):
        for number, change in enumerate(part.changes):
            if change.op is Op.SCHEMA_CHANGE and change.table.name == seen.table.name:
                at, to = part.first + number, change.table
                return msgspec.structs.replace(seen, schema_changed_at=at, changed_to=to, resnapshot=change.resnapshot)
    return seen


def find_end(log: LiveLog, seen: Described, after: int, step: Step) -> Described:
    """`seen`, with where a step of that size after `after` ends."""
    end = log.reach(after, changes=step.changes, bytes=step.bytes)
    return msgspec.structs.replace(seen, step_upto=min(end, seen.latest))
