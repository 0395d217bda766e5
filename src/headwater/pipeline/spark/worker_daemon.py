"""The process that forks Spark's Python workers on this machine, after importing the pipeline's libraries.

Spark starts it as `python -m headwater.pipeline.spark.worker_daemon pyspark.worker`. A worker that imports pandas,
pyarrow and SQLAlchemy by itself takes a second of CPU time before its first row.
"""

from __future__ import annotations

import importlib
from contextlib import suppress

LOADED = ("pyarrow", "pyarrow.compute", "pandas", "sqlalchemy", "headwater.pipeline.spark.part_ends")

if __name__ == "__main__":
    from pyspark.daemon import manager

    for name in LOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    manager()
