"""Reads of a Delta table without Delta's jars: executors read the files that delta-rs lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from headwater.pipeline.sinks.columns import column_reappeared
from headwater.pipeline.sinks.delta.part import TableLocation, whole
from headwater.pipeline.transform.schema import struct_of

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

_BATCH_ROWS = 10_000
_FILES_PER_TASK = 4


def read_rows(spark: SparkSession, location: TableLocation, table: DeltaTable, schema: pa.Schema) -> DataFrame:
    """Return the columns of `schema` from one table version; rows in files older than a column have null there."""
    import pyarrow as pa

    paths = pa.table(table.get_add_actions()).column("path").to_pylist()
    tasks = max(1, -(-len(paths) // _FILES_PER_TASK))
    names = spark.createDataFrame([(path,) for path in paths], "path string").repartition(tasks)
    return names.mapInArrow(FileReader(location, schema), struct_of(schema))


def refuse_values(table: DeltaTable, columns: Sequence[str]) -> None:
    """Raise an error that asks for a new snapshot if one of these columns holds a value other than null."""
    import pyarrow.dataset as ds

    for name in columns:
        rows = table.to_pyarrow_dataset().scanner(columns=[name], filter=ds.field(name).is_valid())
        if rows.head(1).num_rows:
            raise column_reappeared(name)


class FileReader:
    """The Spark task that reads the rows of the files it is given."""

    def __init__(self, location: TableLocation, schema: pa.Schema) -> None:
        self._location, self._schema = location, schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow.fs as files
        import pyarrow.parquet as parquet
        from deltalake.fs import DeltaStorageHandler

        handler = DeltaStorageHandler(self._location.path, self._location.storage_options or None)
        store = files.PyFileSystem(handler)
        for batch in batches:
            for path in batch.column(0).to_pylist():
                with store.open_input_file(path) as file:
                    for rows in parquet.ParquetFile(file).iter_batches(_BATCH_ROWS):
                        yield whole(rows, self._schema, {})
