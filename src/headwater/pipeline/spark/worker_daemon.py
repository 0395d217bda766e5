"""The process that forks Spark's Python workers on this machine, after importing the pipeline's libraries.

Spark starts it as `python -m headwater.pipeline.spark.worker_daemon pyspark.worker`. A worker that imports pandas,
pyarrow and SQLAlchemy by itself takes a second of CPU time before its first row.
"""

from __future__ import annotations

import gc
import importlib
import sys
from contextlib import suppress
from pathlib import PurePath

# Modules that tasks import. deltalake is not one of them: its import starts a thread, which a fork would lose.
LOADED = (
    "pyarrow",
    "pyarrow.compute",
    "pyarrow.parquet",
    "pandas",
    "sqlalchemy",
    "pyspark.worker",
    "headwater.pipeline.spark.datasource",
    "headwater.pipeline.spark.part_ends",
    "headwater.pipeline.sinks.delta.rows",
    "headwater.pipeline.sinks.parquet.files",
    "headwater.pipeline.sinks.sql.rows",
    "headwater.pipeline.sinks.sql.stage_tables",
)


def drop_spark_jar() -> None:
    """Remove Spark's own jar from the import path, where Spark puts it.

    It holds no Python module. Python reads its directory of 6000 files again in every worker: 0.1 s of CPU time each.
    """
    jars = [entry for entry in sys.path if PurePath(entry).match("spark-core_*.jar")]
    sys.path[:] = [entry for entry in sys.path if entry not in jars]
    for found in list(sys.path_importer_cache):
        if found.startswith(tuple(jars)):
            del sys.path_importer_cache[found]


def load() -> None:
    """Import the modules of tasks, and exclude them from garbage collection.

    A worker collects garbage after every task. With these modules that takes 0.06 s of CPU time, and the first
    collection copies the memory that the worker shares with this process.
    """
    for name in LOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    from pyspark.daemon import manager

    drop_spark_jar()
    load()
    manager()
