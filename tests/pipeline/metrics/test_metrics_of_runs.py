"""Metrics of real runs, read from their endpoint while they run."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tests.conformance.live_server import Live
from tests.pipeline.lakes import Lake, fill
from tests.suite.deadlines import PATIENCE

from headwater.pipeline.run.events import Watcher
from headwater.pipeline.run.spec import PipelineSpec, SinkSpec, TableSpec
from headwater.pipeline.runner import run

if TYPE_CHECKING:
    from pathlib import Path

    from headwater.errors import HeadwaterError
    from headwater.pipeline.run.table_report import TableReport
    from headwater.pipeline.run.task import Task


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Scraper(Watcher):
    """A watcher that reads the endpoint when a run is about to end; `values` are those without a label of their own."""

    def __init__(self) -> None:
        self.address = free_address()
        self.values: dict[str, float] = {}
        self.labels: dict[str, str] = {}

    def _read(self) -> None:
        text = httpx.get(f"http://{self.address}/metrics", timeout=PATIENCE).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.values[sample.name.removeprefix("headwater_pipeline_")] = sample.value
                self.labels |= sample.labels

    def failed(self, task: Task, error: HeadwaterError) -> None:
        self._read()

    def done(self, task: Task, offset: int, rows: int) -> None:
        self._read()

    def verified(self, task: Task, report: TableReport) -> None:
        self._read()


def test_table_that_the_server_lacks_is_exposed_as_failed(server: Live, tmp_path: Path) -> None:
    table = TableSpec("orders", SinkSpec("delta", {"path": str(tmp_path / "lake")}))
    seen = Scraper()
    spec = PipelineSpec((table,), "lake", server.url, meta=str(tmp_path / "meta.db"), metrics=seen.address)
    run(spec, once=True, watcher=seen)
    assert seen.values["failed"] == 1
    assert {"pipeline": "lake", "db": "main", "table": "orders", "stage": "failed"}.items() <= seen.labels.items()


def test_run_exposes_its_rows_changes_lag_and_verification(lake: Lake, server: Live) -> None:
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)")
    fill(server, 30)
    seen = Scraper()
    lake.carry(replace(lake.spec(), metrics=seen.address), seen)
    assert (seen.values["rows_total"], seen.values["changes_total"]) == (30, 0)
    assert seen.labels["stage"] == "log" and seen.labels["reason"] == "first"
    assert seen.values["lag_changes"] == seen.values["lag_seconds"] == 0
    server.sql("DELETE FROM t WHERE id <= 3")
    again = Scraper()
    lake.run(replace(lake.spec(), metrics=again.address), again, then_verify=True)
    assert (again.values["rows_total"], again.values["changes_total"]) == (0, 3)
    assert again.values["step_seconds_count"] >= 1
    assert again.values["offset"] == again.values["verified_offset"] == seen.values["offset"] + 3
    assert (again.values["verified"], again.values["lag_changes"]) == (1, 0)
