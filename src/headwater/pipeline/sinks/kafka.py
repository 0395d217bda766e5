"""Kafka: every row and every change as a JSON value under its primary key, by Spark's own Kafka writer.

At least once, and in order per key: one task writes all changes of a key, by offset. Messages stay on a topic, so
rows of a new snapshot are added to the old messages. Changes look like this (plain):

    key    {"id": 1}
    value  {"op": "update", "table": "orders", "offset": 7, "txn": "…", "ts_ms": …, "before": {…}, "after": {…}}

or have Debezium's envelope. An update that changes the key is a delete under the old key and an insert under the
new key; with `tombstones` a null value follows each delete, for compacted topics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headwater.errors import PipelineError
from headwater.model.table import Table
from headwater.pipeline.sinks.envelope import Envelope
from headwater.pipeline.sinks.ledger import Ledger, LedgerSink
from headwater.pipeline.sinks.sink import PLAIN, Part, Step

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headwater.pipeline.sinks.registry import SinkContext


class KafkaSink(LedgerSink):
    """One Kafka topic. `options` are those of Spark's writer: the topic, and settings of the producer (`kafka.…`)."""

    def __init__(self, name: str, ledger: Ledger, envelope: Envelope, options: Mapping[str, str]) -> None:
        super().__init__(name, ledger)
        self._envelope, self._options = envelope, options

    def __repr__(self) -> str:
        return f"KafkaSink({self.name})"  # the options may hold secrets

    def _send_rows(self, frame: DataFrame, parts: Sequence[Part], table: Table) -> None:
        self._write(self._envelope.of_rows(frame, table, parts))

    def _send_changes(self, frame: DataFrame, step: Step, table: Table) -> None:
        self._write(self._envelope.of_changes(frame, table))

    def _write(self, frame: DataFrame) -> None:
        from pyspark.errors import AnalysisException

        try:
            frame.write.format("kafka").options(**self._options).save()
        except AnalysisException as error:
            if "kafka" not in str(error).lower():
                raise
            raise PipelineError(
                "this Spark session has no Kafka connector",
                hint="Fetch its jars: python -m headwater.pipeline.spark.jars, or `make jars`.",
            ) from None


def open_kafka(settings: Mapping[str, Any], context: SinkContext) -> KafkaSink:
    """Return a sink from its checked settings."""
    servers, topic, pieces = settings["servers"], settings["topic"], context.name.split("/")  # pipeline, db, table
    server = pieces[-2] if len(pieces) > 1 else context.name
    envelope = Envelope(settings.get("format", PLAIN), server, settings.get("tombstones", False))
    options = {**settings.get("options", {}), "kafka.bootstrap.servers": servers, "topic": topic}
    return KafkaSink(f"kafka {servers} {topic}", context.ledger, envelope, options)
