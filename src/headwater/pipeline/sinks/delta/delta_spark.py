"""Delta Lake with merges by Spark, for steps that no single machine should hold; needs Delta's jars in the session.

Everything else works as in delta.py, on the same layout: a table may switch between the two sinks at any time.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from headwater.errors import SinkUnfit
from headwater.model.table import Table
from headwater.pipeline.sinks.delta.delta import DeltaSink, Settings
from headwater.pipeline.sinks.delta.layout import SOURCE, TARGET, Merge, held_schema, step_app
from headwater.pipeline.sinks.registry import SinkContext
from headwater.pipeline.sinks.sink import Plan, Step
from headwater.pipeline.transform.compaction import quoted

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
_TXN = "spark.databricks.delta.write"
_TIMES = "spark.sql.parquet.outputTimestampType"  # Spark's default is a legacy format that only Spark still writes
_LOG_TASKS = "spark.databricks.delta.snapshotPartitions"
_CONFLICT = re.compile(r"DELTA_(CONCURRENT|METADATA_CHANGED|PROTOCOL_CHANGED)|Concurrent\w*Exception|MetadataChanged")
_REFUSED = re.compile(r"[ ,;{}()\n\t=]")
_session = threading.Lock()  # a transaction's number is a setting of the whole session


class DeltaSparkSink(DeltaSink):
    """One Delta table, merged by a Spark cluster.

    Spark opens the table itself, after our check. Commits between the two are harmless: Spark skips a closed plan, or
    a step that ends lower, by its transaction number; a step that began lower merges to equal rows.
    """

    keeps = False

    def __init__(self, settings: Settings, spark: SparkSession) -> None:
        super().__init__(settings)
        self.name = f"delta-spark {settings.path}"
        if EXTENSION not in (spark.conf.get("spark.sql.extensions", "") or ""):
            raise SinkUnfit(
                "this Spark session does not support Delta",
                hint=f"Set spark.sql.extensions={EXTENSION} and spark.sql.catalog.spark_catalog={CATALOG}, "
                'and add its jars; or use kind = "delta".',
            )
        if spark.conf.get(_LOG_TASKS, None) is None:  # otherwise Spark uses 50 tasks to read a log of any size
            spark.conf.set(_LOG_TASKS, spark.conf.get("spark.sql.shuffle.partitions") or "4")

    def begin(self, plan: Plan) -> None:
        """See Sink. Rejects column names that Delta in Spark does not accept."""
        self._check_names(plan.table)
        super().begin(plan)

    def evolve(self, table: Table) -> None:
        self._check_names(table)
        super().evolve(table)

    def _check_names(self, table: Table) -> None:
        for name in held_schema(table, self.mode).names:
            if _REFUSED.search(name):
                raise SinkUnfit(
                    f"Delta in Spark does not support a column named {name!r}",
                    hint='Leave it out (`columns`), or use kind = "delta".',
                )

    def _merged(self, source: DataFrame, todo: Step, merge: Merge, held: DeltaTable) -> bool:
        if todo.repair:  # the number of a repair is already recorded, so that Spark would skip the merge
            return super()._merged(source, todo, merge, held)
        app = step_app(todo.plan)
        try:
            with _view(source) as name, _transaction(source.sparkSession, app, todo.upto):
                source.sparkSession.sql(merge_sql(self._location.path, name, merge))
        except Exception as error:
            if _CONFLICT.search(str(error)):
                return False
            raise
        # Spark skips a merge silently, and makes no commit if no row changes.
        table = self._table()
        if table.transaction_version(app) != todo.upto:
            return super()._merged(source.limit(0), todo, merge, table) if self._is_at(table, todo) else False
        return True

    def _is_at(self, table: DeltaTable, todo: Step) -> bool:
        state = self._state(table)
        return state is not None and state.plan.id == todo.plan and state.offset == todo.after


def merge_sql(path: str, source: str, merge: Merge) -> str:
    """Return the MERGE statement into the Delta table at `path` from the view `source`."""
    sets = ", ".join(f"{name} = {value}" for name, value in merge.update.items())
    names, values = ", ".join(merge.insert), ", ".join(merge.insert.values())
    delete = f" WHEN MATCHED AND {merge.delete_if} THEN DELETE" if merge.delete_if else ""
    return (
        f"MERGE INTO delta.{quoted(path)} {TARGET} USING {source} {SOURCE} ON {merge.on}{delete}"
        f" WHEN MATCHED AND {merge.update_if} THEN UPDATE SET {sets}"
        f" WHEN NOT MATCHED AND {merge.insert_if} THEN INSERT ({names}) VALUES ({values})"
    )


@contextmanager
def _view(source: DataFrame) -> Iterator[str]:
    name = f"headwater_{uuid4().hex}"
    source.createTempView(name)
    try:
        yield name
    finally:
        source.sparkSession.catalog.dropTempView(name)


@contextmanager
def _transaction(spark: SparkSession, app: str, number: int) -> Iterator[None]:
    settings = {f"{_TXN}.txnAppId": app, f"{_TXN}.txnVersion": str(number), _TIMES: "TIMESTAMP_MICROS"}
    with _session:
        before = {name: spark.conf.get(name, None) for name in settings}
        for name, value in settings.items():
            spark.conf.set(name, value)
        try:
            yield
        finally:
            for name, old in before.items():
                spark.conf.unset(name) if old is None else spark.conf.set(name, old)


def open_delta_spark(settings: dict[str, Any], context: SinkContext) -> DeltaSparkSink:
    """Return a sink from its checked settings."""
    return DeltaSparkSink(Settings(**settings), context.spark)
