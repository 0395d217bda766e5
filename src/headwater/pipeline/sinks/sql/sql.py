"""SQL upsert or history in PostgreSQL, MySQL, MariaDB or SQLite: rows and progress in one transaction, no JDBC.

Executors copy rows into a staging table; the driver merges the attempts that Spark reports as done, in one
transaction with the sink's locked row in `headwater_sink`. UNIQUE constraints that users add to the target may
fail a merge: two rows that swap values violate them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from headwater.errors import HeadwaterError, PipelineError, SinkFenced, SinkUnfit, Unavailable
from headwater.model.table import Table
from headwater.pipeline.sinks.columns import numbered
from headwater.pipeline.sinks.history import as_history
from headwater.pipeline.sinks.sink import HISTORY, UPSERT, Part, Plan, Sink, State, Step, check, of_plan
from headwater.pipeline.sinks.sql.dialects import IN_KEY, Dialect, Field, fields_of
from headwater.pipeline.sinks.sql.engine import (
    LOCK_SECONDS,
    open_engine,
    ours,
    parse_url,
    read_url,
    reading,
    shown,
    writing,
)
from headwater.pipeline.sinks.sql.stage_tables import ATTEMPT, KEPT, REPORT, StageReport, StageTask, stage_table, staged
from headwater.pipeline.sinks.sql.target import StateTable, Target, create_table
from headwater.pipeline.transform.compaction import change_columns, last_per_key, quoted
from headwater.pipeline.transform.schema import TYPED, identity_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_STAGE = "headwater_stage_"


class SqlSink(Sink):
    """One table of a SQL database, with `headwater_sink` and the staging tables in the same schema."""

    keeps = True

    def __init__(
        self,
        url: str,
        table: str,
        mode: str = UPSERT,
        schema: str | None = None,
        *,
        lock_seconds: int = LOCK_SECONDS,
        replace: bool = False,
    ) -> None:
        self._replace = replace  # whether `begin` may remove rows that no pipeline wrote
        self._url = parse_url(url).render_as_string(hide_password=False)
        self._table, self._schema, self.mode = table, schema, mode
        place = f"{schema}.{table}" if schema else table
        self.name = shown(parse_url(url), place)
        self._engine = open_engine(url, lock_seconds)
        with ours():
            self._dialect = Dialect.of(self._engine)
        self._states = StateTable(self._engine, self._dialect, place, schema)
        self._prefix = _STAGE + hashlib.sha256(place.encode()).hexdigest()[:12] + "_"

    def __repr__(self) -> str:
        return f"SqlSink({self.name})"

    def state(self) -> State | None:
        return self._states.read()

    def begin(self, plan: Plan) -> None:
        """Begin a plan. Its id in the locked progress row fences older runs; the same commit removes their rows."""
        target, held = self._target(plan.table, plan.types), self.state()
        if held is None and not self._replace:
            target.refuse_rows(self._engine)
        self._states.prepare()
        target.prepare(self._engine)
        if TYPED in (plan.types, held and held.plan.types) and (others := target.retyped(self._engine)):
            # Without a plan a run that was killed here begins again, and does not fill columns of the wrong type.
            self._empty(target, None)
            target.replace(self._engine, others)
        self._empty(target, State(plan, plan.offset))
        self._drop_stages()

    def _empty(self, target: Target, state: State | None) -> None:
        """Remove all rows, and write the state, in one transaction."""
        with writing(self._engine) as connection:
            self._states.lock(connection)
            target.empty(connection)
            self._states.write(connection, state)

    def load(self, frame: DataFrame, plan: Plan, parts: Sequence[Part]) -> None:
        state = of_plan(self.state(), plan.id)
        if self.mode == HISTORY:
            frame = as_history(frame, plan.table, parts)
        loaded = frozenset(place for place, part in enumerate(parts) if part.span in state.loaded)
        staging = self._staging(frame, plan.table, plan)
        with self._fencing(plan.id):
            reports = {report.partition: report for report in staging.run(frame, skipped=loaded)}
        for place, part in enumerate(parts):
            if place not in loaded:
                self._load_part(staging, plan, part, reports.get(place))

    def _load_part(self, staging: StagingTable, plan: Plan, part: Part, report: StageReport | None) -> None:
        with writing(self._engine) as connection:
            state = of_plan(self._states.lock(connection), plan.id)
            if part.span in state.loaded:
                return
            attempts = staging.whole(connection, [report] if report else [])
            staging.target.add(connection, staging.table, staging.names, attempts)
            staging.forget(connection, attempts)
            now = msgspec.structs.replace(state, loaded={**state.loaded, part.span: part.version})
            self._states.write(connection, now)

    def apply(self, frame: DataFrame, step: Step, table: Table) -> None:
        """See Sink. `check` runs before rows are staged, and again under the lock."""
        while (todo := check(self.state(), step)) is not None:
            if self._applied(frame, todo, step, table):
                return

    def _applied(self, frame: DataFrame, todo: Step, step: Step, table: Table) -> bool:
        """Apply `todo`; return False if the sink advanced while rows were staged, and a part of `step` is left."""
        left = frame if step.repair else frame.where(f"{quoted(change_columns(frame).offset)} > {todo.after}")
        staging = self._staging(left, table, of_plan(self.state(), step.plan).plan)
        with self._fencing(step.plan):
            reports = staging.run(self._compacted(left, table), has_gone=self.mode == UPSERT)
        with writing(self._engine) as connection:
            state = self._states.lock(connection)
            now = check(state, step)
            if now != todo or state is None:
                return now is None
            attempts = staging.whole(connection, reports)
            merge = staging.target.merge if self.mode == UPSERT else staging.target.add
            merge(connection, staging.table, staging.names, attempts)
            staging.forget(connection, attempts)
            if not step.repair:  # a repair leaves the sink at its offset
                loaded = {span: version for span, version in state.loaded.items() if version > step.upto}
                self._states.write(connection, State(state.plan, step.upto, loaded))
        return True

    def evolve(self, table: Table) -> None:
        """See Sink. The columns are added first: a crash before the commit leaves only unused columns."""
        held = self.state()
        if held is None:
            raise SinkFenced("the sink holds no snapshot")
        target = self._target(table, held.plan.types)
        there = target.prepare(self._engine)
        if held.plan.types == TYPED and (others := target.retyped(self._engine)):
            raise PipelineError(
                f"the values of column {others[0]!r} are of another type now than the column of the sink",
                resnapshot_reason="schema_changed",
            )
        with writing(self._engine) as connection:
            state = of_plan(self._states.lock(connection), held.plan.id)
            if self.mode == UPSERT:
                known = {field.name for field in fields_of(state.plan.table, self.mode)}
                new = [field.name for field in target.fields if field.name not in known]
                target.refuse_values(connection, there.intersection(new))
            plan = msgspec.structs.replace(state.plan, table=table)
            self._states.write(connection, msgspec.structs.replace(state, plan=plan))
        self._drop_stages()

    def rows(self, spark: SparkSession) -> DataFrame:
        from headwater.pipeline.sinks.sql.rows import read_rows

        state = self.state()
        if self.mode != UPSERT or state is None:
            raise SinkUnfit("only a table in mode upsert that has a snapshot can be read back")
        target = self._target(state.plan.table, state.plan.types)
        return read_rows(spark, self._engine, self._url, target, self._dialect, state.plan)

    def close(self) -> None:
        self._engine.dispose()

    def _target(self, table: Table, types: str) -> Target:
        return Target(self._table, self._schema, self._dialect, fields_of(table, self.mode, types))

    def _compacted(self, frame: DataFrame, table: Table) -> DataFrame:
        return frame if self.mode == HISTORY else last_per_key(frame, identity_of(table))

    @contextmanager
    def _fencing(self, plan: str) -> Iterator[None]:
        """Raise SinkFenced instead of a task's failure if a newer run dropped the staging table."""
        try:
            yield
        except Exception:
            of_plan(self.state(), plan)
            raise

    def _staging(self, frame: DataFrame, table: Table, plan: Plan) -> StagingTable:
        """Return the staging table for this frame, without rows of crashed runs.

        The rows are removed under the lock: another driver of this plan may be between its count and its merge.
        """
        target = self._target(table, plan.types)
        fields = [field for field in target.fields if field.name in set(frame.columns)]
        shape = msgspec.json.encode([plan.id, fields, KEPT])
        name = self._prefix + hashlib.sha256(shape).hexdigest()[:8]
        stage = stage_table(name, self._schema, fields, self._dialect)
        create_table(self._engine, stage)
        with writing(self._engine) as connection:
            self._states.lock(connection)
            connection.execute(sa.delete(stage))
        return StagingTable(self._url, stage, target, fields, self._dialect)

    def _drop_stages(self) -> None:
        """Drop the staging tables of this target; skip a table that an old run still writes to."""
        with reading(self._engine) as connection:
            names = sa.inspect(connection).get_table_names(self._schema)
        for name in names:
            if name.startswith(self._prefix):
                with suppress(HeadwaterError), writing(self._engine) as connection:
                    sa.Table(name, sa.MetaData(), schema=self._schema).drop(connection, checkfirst=True)


class StagingTable:
    """One staging table with its target: tasks fill the table, and the driver merges the rows."""

    def __init__(self, url: str, table: sa.Table, target: Target, fields: Sequence[Field], dialect: Dialect) -> None:
        self.table, self.target = table, target
        self.names = [field.name for field in fields]
        self._url, self._fields, self._dialect = url, list(fields), dialect

    def run(
        self, frame: DataFrame, *, has_gone: bool = False, skipped: frozenset[int] = frozenset()
    ) -> list[StageReport]:
        """Stage the partitions of the frame; return the reports of the task attempts that Spark accepted.

        With `has_gone` the frame's last column marks deletes.
        """
        columns = [*self.names, *(frame.columns[-1:] if has_gone else [])]
        stager = StageTask(
            self._url,
            self.table.name,
            self.table.schema,
            self._dialect,
            self._fields,
            has_gone=has_gone,
            skipped=skipped,
        )
        rows = numbered(frame.select(*map(quoted, columns))).mapInArrow(stager, REPORT).collect()
        reports = [StageReport(*row) for row in rows]
        for report in reports:
            if report.problem:
                raise SinkUnfit(report.problem, hint=_KEY if IN_KEY in report.problem else _COLUMN)
        return reports

    def whole(self, connection: sa.Connection, reports: Sequence[StageReport]) -> list[str]:
        """Return the attempts of `reports`; Unavailable if rows are missing: a database crash empties the table."""
        found = staged(connection, self.table)
        if any(found.get(report.attempt, 0) != report.rows for report in reports):
            raise Unavailable("staged rows are missing", hint="The database was restarted; the step is retried.")
        return [report.attempt for report in reports]

    def forget(self, connection: sa.Connection, attempts: Sequence[str]) -> None:
        """Remove the merged rows of `attempts`."""
        connection.execute(sa.delete(self.table).where(self.table.c[ATTEMPT].in_(attempts)))


_KEY = "Fix the rows and start again; loaded parts are kept. A NOT NULL primary key of one type prevents such rows."
_COLUMN = "Leave the column out (`columns`), or write to another sink."


def open_sql(settings: Mapping[str, Any], context: object = None) -> SqlSink:
    """Return a sink from its checked settings."""
    own = {name: value for name, value in settings.items() if not name.startswith("url")}
    return SqlSink(read_url(settings), **own)
