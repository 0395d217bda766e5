"""The Spark data source `headwater`: a table as of one offset, or its changes as batch or stream.

The only file that uses pyspark's Python data source API. Spark creates a source in one process, plans in a second,
requests offsets in a third and reads in its workers: the source stores the description of the table when Spark
requests the schema, and is pickled with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from headwater.client import Client, Described
from headwater.errors import ConfigError
from headwater.pipeline.failure import report_errors, report_generator_errors
from headwater.pipeline.sinks.sink import Part
from headwater.pipeline.spark.log_status import describe_log, shape_schema, start_of
from headwater.pipeline.spark.offsets import (
    StreamOffset,
    StreamParameters,
    check_offset,
    check_types,
    next_offset,
    split_log,
)
from headwater.pipeline.spark.options import METADATA, LogPiece, Options, options_of_table, parse
from headwater.pipeline.spark.part_ends import ended, with_end
from headwater.pipeline.transform import schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

ANY_BYTES = 2**53  # of a step that only its changes limit
IDLE_MS = 100  # an idle stream requests offsets about every 20 ms; the server holds each request this long


def connect(options: Options) -> Client:
    """Return a client for this process, which reads the token itself: tokens are not sent between processes."""
    return Client(options.url, token_file=options.token_file)


class HeadwaterDataSource(DataSource):
    """The data source of `spark.read.format("headwater")` and `spark.readStream.format("headwater")`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        self.status: Described | None = None  # from the request for the schema

    @classmethod
    def name(cls) -> str:
        return "headwater"

    @report_errors
    def schema(self) -> StructType:
        of_table = options_of_table(self.options)
        options = parse(self.options if of_table is None else of_table)
        with closing(connect(options)) as client:
            self.status = describe_log(client, options)
            struct = schema.struct_of(_columns(client, options, self.status))
        return struct if of_table is None else _with_options(struct, of_table)

    @report_errors
    def reader(self, schema: StructType) -> BatchReader:
        return BatchReader(parse(self._given(schema)), self.status, schema)

    @report_errors
    def streamReader(self, schema: StructType) -> LogStream:
        return LogStream(parse(self._given(schema)), self.status, schema)

    def _given(self, schema: StructType) -> Mapping[str, str]:
        """Return the options of the reader, after those of its table if it reads a table in Spark's catalog."""
        return self.options if "url" in self.options else {**_options_in(schema), **self.options}


def _with_options(struct: StructType, options: Mapping[str, str]) -> StructType:
    """Return the columns of a table in Spark's catalog with its options, which the first column carries."""
    struct.fields[0].metadata = {METADATA: json.dumps(options)}
    return struct


def _options_in(struct: StructType) -> dict[str, str]:
    """Return the options that the columns of a table in Spark's catalog carry; {} if they are of a reader."""
    found: dict[str, str] = json.loads(next((f.metadata[METADATA] for f in struct if METADATA in f.metadata), "{}"))
    return found


def _columns(client: Client, options: Options, status: Described) -> pa.Schema:
    if options.tables:
        return schema.tables_schema()
    if not options.is_log:
        rows = schema.rows_schema(status.table, options.columns, options.form)
        return with_end(rows) if options.ends else rows
    if options.shape in (None, status.table.version):
        return schema.changes_schema(status.table, options.columns, options.form)
    return shape_schema(client, options, status)


class TaskPartition(InputPartition):
    """The partition of one task: a part of a snapshot or of the log, of one generation."""

    def __init__(self, generation: str, what: Part | LogPiece, shape: int | None = None) -> None:
        super().__init__((generation, what, shape))
        self.generation, self.what, self.shape = generation, what, shape


def pull(client: Client, options: Options, piece: TaskPartition) -> Iterator[pa.RecordBatch]:
    """Return the batches of one task as the server sends them."""
    what = piece.what
    if isinstance(what, Part):
        return client.snapshot(
            options.db,
            options.table,
            version=f"{piece.generation}.{what.version}",
            span=what.span,
            columns=options.columns,
            where=options.where,
        )
    bounds: dict[str, Any] = {"generation": piece.generation, "after": what.after, "upto": what.upto}
    if options.tables:
        return client.log_tables(options.db, options.named_tables, **bounds)
    return client.log(
        options.db,
        options.table,
        **bounds,
        span=what.span,
        shape=piece.shape,
        columns=options.columns,
        where=options.where,
    )


def read(options: Options, columns: StructType, piece: InputPartition) -> Iterator[pa.RecordBatch]:
    """Return the batches of one task in Spark's schema, without empty batches, which Spark does not need."""
    if not isinstance(piece, TaskPartition):
        return  # Spark makes a partition of its own if there is nothing to read
    whole = schema.arrow_of(columns)
    wanted = whole.remove(len(whole) - 1) if options.ends else whole
    with closing(connect(options)) as client:
        batches = (schema.fit(batch, wanted) for batch in pull(client, options, piece) if batch.num_rows)
        yield from ended(batches, whole) if options.ends else batches


class BatchReader(DataSourceReader):
    """Reader of rows as of one offset, or of a slice of the log; defaults are from the description at schema time."""

    def __init__(self, options: Options, status: Described | None, columns: StructType) -> None:
        self._options, self._status, self._columns = options, status, columns

    @report_errors
    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        if options.generation is not None:
            given = options.parts if options.slices is None else options.slices
            if given is not None:
                return [TaskPartition(options.generation, what, options.shape) for what in given]
        with closing(connect(options)) as client:
            status = self._status or describe_log(client, options)
            generation = options.generation or status.generation
            found = self._log(client, status) if options.is_log else self._rows(client, status)
        shape = options.shape or (None if options.tables else status.table.version)
        return [TaskPartition(generation, what, shape) for what in found]

    def _rows(self, client: Client, status: Described) -> Sequence[Part]:
        options = self._options
        if options.parts is not None:
            return options.parts
        version = status.latest if options.version is None else options.version
        ranges = client.ranges(options.db, options.table, options.range_bytes)
        return [Part(each.span, version) for each in ranges]

    def _log(self, client: Client, status: Described) -> Sequence[LogPiece]:
        options = self._options
        if options.slices is not None:
            return options.slices
        after = start_of(client, options, status) if options.after is None else options.after
        upto = status.latest if options.upto is None else options.upto
        check_offset(StreamOffset(options.generation or status.generation, after), status)
        if upto <= status.latest and not options.tables:
            upto = min(upto, max(status.table_latest, after))  # no task reads changes of other tables alone
        return list(split_log(after, upto, options.rows_per_partition))

    @report_generator_errors
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from read(self._options, self._columns, partition)


class LogStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Stream of changes as they are committed; one connection, in a process of its own, requests the offsets."""

    def __init__(self, options: Options, status: Described | None, columns: StructType) -> None:
        if not options.is_log:
            raise ConfigError(
                "the start of the stream is missing",
                hint="Set startingOffset to earliest, latest or an offset, or set startingTimestamp.",
            )
        self._options, self._columns = options, columns
        shape = 0 if options.tables else options.shape or (status.table.version if status else 0)
        has_forms = status is None or options.shape is not None or schema.has_forms(status.table)
        self._reading = StreamParameters(
            shape, options.policy, options.max_rows, types=options.form, has_forms=has_forms
        )
        self._client: Client | None = None  # created where offsets are requested; readers in tasks have their own
        self._latest: StreamOffset | None = None

    @report_errors
    def initialOffset(self) -> dict[str, Any]:
        status = self._describe()
        assert self._client is not None
        after = start_of(self._client, self._options, status)
        position = StreamOffset(status.generation, after, self._reading.shape, self._reading.types)
        check_offset(position, status)
        return position.to_json()

    @report_errors
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        position = StreamOffset.read(start)
        reading = self._reading
        if isinstance(limit, ReadAllAvailable):
            reading = msgspec.structs.replace(reading, max_rows=None)
        wait_ms = IDLE_MS if reading.target is None else 0
        step = None if reading.max_rows is None or self._options.tables else (reading.max_changes, ANY_BYTES)
        return next_offset(position, self._describe(position, wait_ms, step), reading).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable() if self._options.max_rows is None else ReadMaxRows(self._options.max_rows)

    @report_errors
    def prepareForTriggerAvailableNow(self) -> None:
        self._reading = msgspec.structs.replace(self._reading, target=self._describe().latest)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return None if self._latest is None else self._latest.to_json()

    @report_errors
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        first, last = StreamOffset.read(start), StreamOffset.read(end)
        check_types(first, self._reading)
        check_offset(first, self._describe(first))  # Spark plans a batch of an earlier run before it requests offsets
        pieces = split_log(first.offset, last.offset, self._options.rows_per_partition)
        return [TaskPartition(last.generation, what, self._reading.shape or None) for what in pieces]

    @report_generator_errors
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from read(self._options, self._columns, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Spark keeps the checkpoint, and the server stores no position for the stream."""

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()

    def _describe(
        self, position: StreamOffset | None = None, wait_ms: int = 0, step: tuple[int, int] | None = None
    ) -> Described:
        if self._client is None:
            self._client = connect(self._options)
        after = None if position is None else position.offset
        status = describe_log(
            self._client, self._options, after=after, wait_ms=wait_ms, shape=self._reading.shape or None, step=step
        )
        if not self._reading.shape and not self._options.tables:
            self._reading = msgspec.structs.replace(self._reading, shape=status.table.version)
        self._latest = StreamOffset(status.generation, status.latest, self._reading.shape, self._reading.types)
        return status
