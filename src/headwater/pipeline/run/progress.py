"""The meta store: the tables that pipelines carry, their sinks, owners and progress.

Its progress is a copy for users and other pipeline servers: each sink stores its own. Only for sinks that cannot
store any state the meta store also holds the state itself (the Ledger).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from headwater.errors import ConfigError, NotOwner, PipelineError
from headwater.model.keys.key import Span
from headwater.pipeline.run.meta_database import DB_CHARS, NAME_CHARS, PROGRESS, SUBSCRIBE, TABLE_CHARS, MetaDatabase
from headwater.pipeline.run.spec import PipelineSpec, TableSpec
from headwater.pipeline.run.task import FAILED, STAGES, RangeProgress, Task
from headwater.pipeline.sinks.sink import Plan, State


class MetaStore(AbstractContextManager["MetaStore"]):
    """The tables `headwater_subscribe` and `headwater_progress` of one database. Thread-safe."""

    def __init__(self, database: MetaDatabase) -> None:
        self.database = database

    @classmethod
    def open(cls, url: str) -> MetaStore:
        """Return the store at `url` (or in the SQLite file of that name); create its tables if they do not exist."""
        database = MetaDatabase(url)
        try:
            database.prepare()
        except BaseException:
            database.close()
            raise
        return cls(database)

    def close(self) -> None:
        """Close the connections."""
        self.database.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    # Tasks

    def subscribe(self, spec: PipelineSpec, table: TableSpec) -> Task:
        """Return the task of one table of a pipeline, created if necessary; PipelineError if its sink has changed."""
        task = Task(spec.name, table.db, table.table, server=spec.server, sink=table.sink.shown)
        _check(task)
        if not self.tasks(task.name, task.db, task.table):
            self._insert(task)
        update = sa.update(SUBSCRIBE).where(of_task(task), (SUBSCRIBE.c.state == "") | (SUBSCRIBE.c.sink == task.sink))
        with self.database.transaction() as connection:
            if not connection.execute(update.values(master_addrs=task.server, sink=task.sink)).rowcount:
                raise _other_sink(connection, task)
        (found,) = self.tasks(task.name, task.db, task.table)
        return found

    def _insert(self, task: Task) -> None:
        row = {
            "cluster_id": task.cluster_id,
            "db_name": task.db,
            "table_name": task.table,
            "subscribe_name": task.name,
            "master_addrs": task.server,
            "sink": task.sink,
            "updated_ms": self.database.now,
        }
        with self.database.transaction() as connection, suppress(IntegrityError):  # another pipeline server was first
            connection.execute(sa.insert(SUBSCRIBE).values(row))

    def tasks(self, name: str | None = None, db: str | None = None, table: str | None = None) -> list[Task]:
        """Return the tasks of a pipeline, or all tasks, ordered by name."""
        left = (SUBSCRIBE.c.owner_until_ms - self.database.now).label("left")
        query = sa.select(SUBSCRIBE, left).where(*_named(name, db, table)).order_by(*_ORDER)
        with self.database.transaction() as connection:
            return [_task(row._mapping) for row in connection.execute(query)]

    def cancel(self, name: str, db: str | None = None, table: str | None = None, *, undo: bool = False) -> int:
        """Ask the owners of the tasks to stop, or withdraw that with `undo`; return the number of tasks."""
        with self.database.transaction() as connection:
            update = sa.update(SUBSCRIBE).where(*_named(name, db, table))
            return connection.execute(update.values(cancel=int(not undo), updated_ms=self.database.now)).rowcount

    def is_cancelled(self, task: Task) -> bool:
        """Return whether a stop was requested; a deleted task counts as cancelled."""
        with self.database.transaction() as connection:
            found = connection.execute(sa.select(SUBSCRIBE.c.cancel).where(of_task(task))).scalar()
        return found is None or bool(found)

    def reset(self, name: str, db: str | None = None, table: str | None = None, *, force: bool = False) -> int:
        """Delete progress, ledger and error, so that the next run takes a new snapshot; return the number of tasks.

        Raise NotOwner while a pipeline server works on one of the tasks; with `force` that server is fenced instead.
        """
        which, now = _named(name, db, table), self.database.now
        unheld = [] if force else [(SUBSCRIBE.c.owner == "") | (SUBSCRIBE.c.owner_until_ms <= now)]
        blank = {"state": "", "error": "", "owner": "", "owner_until_ms": 0, "cancel": 0, "verified_through": None}
        with self.database.transaction() as connection:
            done = connection.execute(
                sa.update(SUBSCRIBE)
                .where(*which, *unheld)
                .values(blank | {"resnapshot": 1, "fence": SUBSCRIBE.c.fence + 1, "updated_ms": now})
            )
            held = connection.execute(sa.select(SUBSCRIBE).where(*which, SUBSCRIBE.c.owner != "")).first()
            if held is not None:
                raise NotOwner(
                    f"{held.db_name}.{held.table_name} of {held.subscribe_name} is being worked on by {held.owner}",
                    hint="Stop it, or cancel the pipeline, first.",
                )
            connection.execute(sa.delete(PROGRESS).where(*_named(name, db, table, PROGRESS)))
            return done.rowcount

    def is_reset(self, task: Task) -> bool:
        """Return whether a reset was requested after the last snapshot began."""
        with self.database.transaction() as connection:
            return bool(connection.execute(sa.select(SUBSCRIBE.c.resnapshot).where(of_task(task))).scalar())

    # Progress: only the owner writes it, by its fence

    def begun(self, task: Task, fence: int) -> None:
        """Record that the sink has begun a snapshot, which completes a requested reset."""
        self._update(task, fence, resnapshot=0)

    def progress(self, task: Task) -> list[RangeProgress]:
        """Return the ranges of the task in key order, as last saved."""
        query = sa.select(PROGRESS).where(*_named(task.name, task.db, task.table, PROGRESS))
        with self.database.transaction() as connection:
            rows = [_progress(row._mapping) for row in connection.execute(query)]
        return sorted(rows, key=lambda row: row.span.start)

    def save(self, task: Task, rows: Sequence[RangeProgress], fence: int) -> None:
        """Replace the progress of a task; raise NotOwner if another pipeline server took the task."""
        with self.database.transaction() as connection:
            self._update_row(connection, task, fence)
            connection.execute(sa.delete(PROGRESS).where(*_named(task.name, task.db, task.table, PROGRESS)))
            if rows:
                connection.execute(sa.insert(PROGRESS), [_columns(task, row) for row in rows])

    def fail(self, task: Task, reason: str, fence: int | None = None) -> None:
        """Record that the task and its ranges failed; the next lease clears the error."""
        with self.database.transaction() as connection:
            self._update_row(connection, task, fence, error=reason)
            connection.execute(
                sa.update(PROGRESS)
                .where(*_named(task.name, task.db, task.table, PROGRESS))
                .values(progress_stage=STAGES.index(FAILED), reason=reason)
            )

    def verified(self, task: Task, offset: int) -> None:
        """Record that source and sink were equal at `offset`."""
        self._update(task, None, verified_through=offset)

    def _update(self, task: Task, fence: int | None, **values: Any) -> None:
        with self.database.transaction() as connection:
            self._update_row(connection, task, fence, **values)

    def _update_row(self, connection: sa.Connection, task: Task, fence: int | None, **values: Any) -> None:
        """Write `values` if the fence is the newest; as the first statement it locks out others until the commit."""
        fenced = [] if fence is None else [SUBSCRIBE.c.fence == fence]
        update = sa.update(SUBSCRIBE).where(of_task(task), *fenced).values(**values, updated_ms=self.database.now)
        if not connection.execute(update).rowcount:
            raise NotOwner(f"{task.db}.{task.table} of {task.name} was taken by another pipeline server, or reset")


class Ledger:
    """The state of a sink that cannot store its own; with a fence, only the owner of the task can write it."""

    def __init__(self, store: MetaStore, task: Task, fence: int | None = None) -> None:
        self._store, self._task, self._fence = store, task, fence

    def load(self) -> State | None:
        """Return the state last saved; None before the first snapshot."""
        with self._store.database.transaction() as connection:
            text = connection.execute(sa.select(SUBSCRIBE.c.state).where(of_task(self._task))).scalar()
        if not text:
            return None
        found = msgspec.json.decode(text, type=_State)
        return State(found.plan, found.offset, dict(found.loaded))

    def save(self, state: State) -> None:
        """Store the sink's state; raise NotOwner if another pipeline server took the task, or the task was reset."""
        stored = _State(state.plan, state.offset, list(state.loaded.items()))
        self._store._update(self._task, self._fence, state=msgspec.json.encode(stored).decode())


# --- rows and values -------------------------------------------------------------------------------------

_ORDER = (SUBSCRIBE.c.subscribe_name, SUBSCRIBE.c.db_name, SUBSCRIBE.c.table_name)


def _named(
    name: str | None, db: str | None, table: str | None, of: sa.Table = SUBSCRIBE
) -> list[sa.ColumnElement[bool]]:
    given = {"subscribe_name": name, "db_name": db, "table_name": table}
    return [of.c[column] == value for column, value in given.items() if value is not None]


def of_task(task: Task) -> sa.ColumnElement[bool]:
    """Return the condition that selects the row of a task in SUBSCRIBE."""
    return sa.and_(SUBSCRIBE.c.cluster_id == task.cluster_id, *_named(task.name, task.db, task.table))


def _check(task: Task) -> None:
    for what, value, most in (
        ("name of the pipeline", task.name, NAME_CHARS),
        ("name of the database", task.db, DB_CHARS),
        ("name of the table", task.table, TABLE_CHARS),
    ):
        if len(value) > most:
            raise ConfigError(f"the {what} has {len(value)} characters, and the meta store keeps {most}: {value[:40]}…")


def _other_sink(connection: sa.Connection, task: Task) -> PipelineError:
    """Return the error for a changed sink: a ledger is valid only for the sink that wrote it."""
    found = connection.execute(sa.select(SUBSCRIBE.c.sink).where(of_task(task))).scalar()
    return PipelineError(
        f"pipeline {task.name!r} carries {task.db}.{task.table} into {found}, not into {task.sink}",
        hint=f"Give the new pipeline another name, or run `headwater pipeline reset {task.name}`.",
    )


def _task(row: Any) -> Task:
    return Task(
        row["subscribe_name"],
        row["db_name"],
        row["table_name"],
        row["cluster_id"],
        row["master_addrs"],
        row["sink"],
        bool(row["cancel"]),
        bool(row["resnapshot"]),
        row["owner"],
        int(row["left"]) if row["owner"] else 0,
        row["error"],
        row["verified_through"],
        row["updated_ms"],
    )


def _progress(row: Any) -> RangeProgress:
    end = row["end_key"]
    return RangeProgress(
        row["range_id"],
        row["range_epoch"],
        Span(bytes.fromhex(row["start_key"]), None if end is None else bytes.fromhex(end)),
        STAGES[row["progress_stage"]],
        row["progress_init_snapshot_version"],
        row["progress_current_snapshot_version"],
        bytes.fromhex(row["progress_last_snapshot_key"]),
        row["progress_last_log_index"],
        row["reason"],
        row["rows"],
        row["rows_estimate"],
    )


def _columns(task: Task, row: RangeProgress) -> dict[str, Any]:
    return {
        "db_name": task.db,
        "table_name": task.table,
        "subscribe_name": task.name,
        "range_id": row.range_id,
        "progress_stage": STAGES.index(row.stage),
        "progress_init_snapshot_version": row.init_version,
        "progress_current_snapshot_version": row.version,
        "progress_last_snapshot_key": row.last_key.hex(),
        "progress_last_log_index": row.last_offset,
        "range_epoch": row.epoch,
        "start_key": row.span.start.hex(),
        "end_key": None if row.span.end is None else row.span.end.hex(),
        "reason": row.reason,
        "rows": row.rows,
        "rows_estimate": row.rows_estimate,
    }


class _State(msgspec.Struct):
    """A State with `loaded` as a list of pairs: a Span cannot be a key of a JSON object."""

    plan: Plan
    offset: int
    loaded: list[tuple[Span, int]]
