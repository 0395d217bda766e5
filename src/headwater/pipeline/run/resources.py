"""The resources of a pipeline: its Spark session and its sinks, opened after a check of the guarantee."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from headwater.errors import SinkUnfit
from headwater.pipeline.run.progress import Ledger, MetaStore
from headwater.pipeline.run.spec import EXACTLY_ONCE, PipelineSpec, TableSpec
from headwater.pipeline.run.task import Task
from headwater.pipeline.sinks.registry import is_exactly_once, open_sink
from headwater.pipeline.sinks.sink import Sink
from headwater.pipeline.spark.frames import register
from headwater.pipeline.spark.jars import DELTA, KAFKA
from headwater.pipeline.spark.session import close_session, open_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JARS = {"delta-spark": DELTA, "kafka": KAFKA}  # kinds of sinks that need jars


def check_promises(spec: PipelineSpec) -> None:
    """Raise SinkUnfit for a guarantee that a sink cannot give, before anything is started."""
    for table in spec.tables:
        if spec.guarantee == EXACTLY_ONCE and not is_exactly_once(table.sink.kind):
            raise SinkUnfit(
                f"sink {table.sink.kind!r} of table {table.table!r} does not support exactly-once delivery",
                hint='Set guarantee = "at-least-once" in [pipeline], or use delta, parquet or sql.',
            )


@contextmanager
def session_of(spec: PipelineSpec, master: str | None = None) -> Iterator[SparkSession]:
    """Open the Spark session of a pipeline, with the format `headwater` registered."""
    check_promises(spec)
    kinds = {JARS[table.sink.kind] for table in spec.tables if table.sink.kind in JARS}
    own = {"spark.jars": ",".join(spec.jars), "spark.jars.packages": ",".join(spec.packages)}
    conf = {name: value for name, value in own.items() if value} | dict(spec.conf)
    session = open_session(master or spec.master, f"headwater {spec.name}", jars=kinds, conf=conf)
    try:
        register(session)
        yield session
    finally:
        close_session(session)


@contextmanager
def sink_of(
    spec: PipelineSpec,
    table: TableSpec,
    task: Task,
    meta: MetaStore,
    spark: SparkSession,
    fence: int | None = None,
) -> Iterator[Sink]:
    """Open the sink of one table."""
    name, settings = f"{spec.name}/{table.db}/{table.table}", dict(table.sink.settings)
    ledger = Ledger(meta, task, fence)
    with closing(open_sink(table.sink.kind, settings, name=name, spark=spark, ledger=ledger)) as sink:
        yield sink
