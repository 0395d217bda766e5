"""The process from which Spark forks its Python workers on this machine: it loads the libraries of the pipeline first.

Spark starts it as `python -m headwater.pipeline.spark.worker_daemon pyspark.worker`. A worker that loads pandas,
pyarrow and SQLAlchemy by itself takes a second of computing time before its first row.
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
