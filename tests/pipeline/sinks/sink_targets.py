"""Targets for sinks: each opens sinks on one empty place, and reads its content without them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
from pyspark.sql import SparkSession
from tests.pipeline.servers import no_mariadb, no_postgres, start_mariadb, start_postgres
from tests.pipeline.sinks.sql_parquet_foreach_targets import ForeachTarget, ParquetTarget, on_server, on_sqlite

from headwater.pipeline.sinks.sink import HISTORY, UPSERT, Sink
from headwater.pipeline.spark.jars import DELTA, FOLDER, have_jars

Row = dict[str, Any]
ROOT = Path(__file__).parents[3]


class Target(Protocol):
    """One place, empty at first. `sink` opens it again each time, as another driver would (or `rival` does)."""

    def sink(self) -> Sink: ...

    def rows(self) -> list[Row]:
        """Return the current rows: the columns of the table and `_misfit`; of a history, those at its end."""
        ...

    def images(self) -> list[tuple[int, str, Any]]:
        """Return offset, change type and key of everything in a history, repeats included."""
        ...

    def close(self) -> None: ...


class Factory:
    """A named way to make a target; `needs` returns what is missing for it here, or ""."""

    def __init__(
        self,
        name: str,
        mode: str,
        make: Callable[[SparkSession, Path, str], Target],
        needs: Callable[[], str] = lambda: "",
        *,
        exactly_once: bool = True,
        is_embedded: bool = False,  # needs nothing but Spark itself: the whole contract runs in `make test`
        even_on_ci: bool = False,  # skip on CI too: what is missing comes from a repository that may not answer
    ) -> None:
        self.name, self.mode, self.make, self.needs = f"{name}-{mode}", mode, make, needs
        self.exactly_once, self.is_embedded, self.even_on_ci = exactly_once, is_embedded, even_on_ci

    def require(self) -> None:
        """Skip the test if something is missing; fail on CI."""
        missing = self.needs()
        if missing and os.environ.get("CI") == "true" and not self.even_on_ci:
            pytest.fail(f"{self.name}: {missing}")
        if missing:
            pytest.skip(f"{self.name}: {missing}")


# Delta


class DeltaTarget:
    """A folder, read by pyarrow from the files that delta-rs names."""

    def __init__(self, spark: SparkSession, folder: Path, mode: str, kind: str = "delta") -> None:
        self.path, self._spark, self._mode, self._kind = folder / "lake", spark, mode, kind

    def sink(self) -> Sink:
        return self._sink(self._kind)

    def rival(self) -> Sink:
        """Return another driver's sink: delta-rs, as two Spark merges in one session wait for each other."""
        return self._sink("delta")

    def _sink(self, kind: str) -> Sink:
        from headwater.pipeline.sinks.registry import open_sink

        return open_sink(kind, {"path": str(self.path), "mode": self._mode}, name="t", spark=self._spark)

    def stored_rows(self) -> list[Row]:
        """Return every row of the newest version."""
        import pyarrow.parquet as pq
        from deltalake import DeltaTable

        table = DeltaTable(str(self.path))
        names = [field.name for field in table.schema().fields]
        rows = [row for uri in table.file_uris() for row in pq.ParquetFile(uri).read().to_pylist()]
        return [{name: row.get(name) for name in names} for row in rows]

    def rows(self) -> list[Row]:
        about = ("_change_type", "_commit_version", "_offset", "_txn", "_valid_from", "_valid_to", "_is_current")
        return [
            {name: value for name, value in row.items() if name not in about}
            for row in self.stored_rows()
            if row.get("_is_current", True)
        ]

    def images(self) -> list[tuple[int, str, Any]]:
        return [(row["_offset"], row["_change_type"], row["id"]) for row in self.stored_rows()]

    def close(self) -> None:
        pass


def _delta(kind: str) -> Callable[[SparkSession, Path, str], Target]:
    return lambda spark, folder, mode: DeltaTarget(spark, folder, mode, kind)


def _no_delta_jars() -> str:
    return "" if have_jars(DELTA, ROOT / FOLDER) else "no Delta jars for Spark here; `make jars` fetches them"


FACTORIES = [
    *(Factory("delta", mode, _delta("delta"), is_embedded=True) for mode in (UPSERT, HISTORY)),
    *(
        Factory("delta-spark", mode, _delta("delta-spark"), _no_delta_jars, even_on_ci=True)
        for mode in (UPSERT, HISTORY)
    ),
    *(Factory("sql-sqlite", mode, on_sqlite, is_embedded=True) for mode in (UPSERT, HISTORY)),
    *(Factory("sql-postgresql", mode, on_server(start_postgres), no_postgres) for mode in (UPSERT, HISTORY)),
    *(Factory("sql-mysql", mode, on_server(start_mariadb), no_mariadb) for mode in (UPSERT, HISTORY)),
    Factory("parquet", HISTORY, ParquetTarget, is_embedded=True),
    Factory("foreach", HISTORY, ForeachTarget, exactly_once=False, is_embedded=True),
]
