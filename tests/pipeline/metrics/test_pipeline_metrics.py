"""Metrics of a run: their values after events, their format, and that docs and dashboard name the same ones."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.doc_pages import ROOT, code, page, table

from headwater.errors import PipelineError, Unavailable
from headwater.model.keys.key import Span
from headwater.pipeline.metrics.metrics import BUCKETS, METRICS, PipelineMetrics
from headwater.pipeline.run.events import Watcher, Watchers
from headwater.pipeline.run.table_report import Digest, RangeReport, TableReport
from headwater.pipeline.run.task import Task

TASK, OTHER = Task("lake", "main", "orders"), Task("lake", "shop", "items")


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class Counted(PipelineMetrics):
    """The metrics of a pipeline `lake`, with a clock that the test sets."""

    def __init__(self) -> None:
        self.clock = Clock()
        super().__init__("lake", clock=self.clock, now=lambda: 1_700_000_000.0 + self.clock.seconds)

    def value(self, name: str, task: Task = TASK, **labels: str) -> float | None:
        """Return one value of a table from the exposed text; None if it is absent."""
        wanted = {"pipeline": task.name, "db": task.db, "table": task.table, **labels}
        found = [
            sample.value
            for family in text_string_to_metric_families(self.text())
            for sample in family.samples
            if sample.name == f"headwater_pipeline_{name}" and sample.labels == wanted
        ]
        assert len(found) <= 1
        return found[0] if found else None


@pytest.fixture
def counted() -> Counted:
    return Counted()


def test_committed_rows_and_changes_are_counted_per_table(counted: Counted) -> None:
    counted.started(TASK, "first", 30, 3)
    counted.loaded(TASK, 2, 20, 1.5)
    counted.loaded(TASK, 1, 10, 20.0)
    counted.clock.seconds = 160.0
    counted.stepped(TASK, 45, 5, 0.2)
    counted.loaded(OTHER, 1, 7, 0.1)
    assert (counted.value("rows_total"), counted.value("changes_total")) == (30, 5)
    assert (counted.value("rows_total", OTHER), counted.value("changes_total", OTHER)) == (7, 0)
    assert counted.value("snapshots_total", reason="first") == 1
    assert counted.value("last_commit_timestamp_seconds") == 1_700_000_160.0
    assert counted.value("offset") == 45


def test_durations_are_counted_in_cumulative_buckets(counted: Counted) -> None:
    for seconds in (0.1, 0.2, 4.0, 1000.0):
        counted.stepped(TASK, 1, 1, seconds)
    buckets = [counted.value("step_seconds_bucket", le=bound) for bound in (*map(str, BUCKETS), "+Inf")]
    assert buckets == [1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 4]
    assert (counted.value("step_seconds_count"), counted.value("step_seconds_sum")) == (4, pytest.approx(1004.3))
    assert counted.value("load_seconds_count") == 0


def test_lag_is_the_age_of_the_oldest_change_that_the_sink_has_not_reached(counted: Counted) -> None:
    assert (counted.value("lag_changes"), counted.value("lag_seconds")) == (None, None)

    def lag_at(seconds: float) -> tuple[float | None, float | None]:
        counted.clock.seconds = seconds
        return counted.value("lag_changes"), counted.value("lag_seconds")

    counted.measured(TASK, 10, 10)
    assert lag_at(105.0) == (0, 0)
    counted.measured(TASK, 10, 14)  # at 105
    assert lag_at(108.0) == (4, 3)
    counted.measured(TASK, 10, 20)  # at 108
    assert lag_at(110.0) == (10, 5)
    counted.stepped(TASK, 14, 4, 0.1)  # the changes of 105 are in the sink, those of 108 are not
    assert lag_at(110.0) == (6, 2)
    counted.measured(TASK, 14, 20)
    assert lag_at(112.0) == (6, 4)
    counted.stepped(TASK, 20, 6, 0.1)
    assert lag_at(200.0) == (0, 0)


def test_new_snapshot_makes_offset_and_lag_unknown(counted: Counted) -> None:
    counted.measured(TASK, 10, 14)
    counted.started(TASK, "wal_horizon_exceeded", 1, 1)
    assert [counted.value(name) for name in ("offset", "lag_changes", "lag_seconds")] == [None] * 3
    counted.measured(TASK, 3, 3)  # of a new generation
    assert [counted.value(name) for name in ("offset", "lag_changes", "lag_seconds")] == [3, 0, 0]


def test_stage_retries_and_failure_of_a_table_are_exposed(counted: Counted) -> None:
    assert counted.value("stage_info", stage="register") is None
    counted.stage(TASK, "register")
    counted.stage(TASK, "log")
    counted.retrying(TASK, Unavailable("away"), 1)
    counted.retrying(TASK, Unavailable("away"), 2)
    counted.retrying(TASK, PipelineError("broken"), 3)
    assert (counted.value("stage_info", stage="log"), counted.value("stage_info", stage="register")) == (1, None)
    assert counted.value("failed") == 0
    assert counted.value("retries_total", code="unavailable") == 2
    assert counted.value("retries_total", code="pipeline_failed") == 1
    counted.failed(TASK, PipelineError("broken"))
    assert (counted.value("stage_info", stage="failed"), counted.value("stage_info", stage="log")) == (1, None)
    assert counted.value("failed") == 1


def test_result_of_the_last_comparison_is_exposed(counted: Counted) -> None:
    counted.stage(TASK, "log")
    assert counted.value("verified") is None
    right, wrong = Digest(1, 5, 5), Digest(1, 6, 6)
    counted.verified(TASK, TableReport("main", "orders", 12, (RangeReport(Span.all(), right, right),)))
    assert (counted.value("verified"), counted.value("verified_offset")) == (1, 12)
    assert counted.value("verified_timestamp_seconds") == 1_700_000_100.0
    counted.verified(TASK, TableReport("main", "orders", 13, (RangeReport(Span.all(), right, wrong),)))
    assert (counted.value("verified"), counted.value("verified_offset")) == (0, 13)
    counted.verified(TASK, TableReport("main", "orders", error=PipelineError("broken")))
    assert (counted.value("verified"), counted.value("verified_offset")) == (0, None)


def every_event(watcher: Watcher) -> None:
    watcher.started(TASK, "first", 1, 1)
    watcher.stage(TASK, "log")
    watcher.loaded(TASK, 1, 1, 1.0)
    watcher.stepped(TASK, 2, 1, 1.0)
    watcher.measured(TASK, 2, 3)
    watcher.retrying(TASK, Unavailable("away"), 1)
    watcher.verified(TASK, TableReport("main", "orders", 2))


def test_exposed_metrics_are_exactly_those_of_the_table(counted: Counted) -> None:
    every_event(counted)
    families = {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in text_string_to_metric_families(counted.text())
    }
    assert {name: (each.type, each.documentation) for name, each in families.items()} == {
        name: (kind, text) for name, (kind, text, _) in METRICS.items()
    }
    for name, family in families.items():
        assert family.samples, name
        assert {frozenset(sample.labels) - {"le"} for sample in family.samples} == {frozenset(METRICS[name][2])}


def test_names_with_quotes_and_line_breaks_are_escaped(counted: Counted) -> None:
    odd = Task('a"b', "c\\d", "e\nf")
    counted.loaded(odd, 1, 3, 0.1)
    assert counted.value("rows_total", odd) == 3


def test_every_watcher_receives_every_event() -> None:
    class Recorder(Watcher):
        def __init__(self) -> None:
            self.events: list[tuple[Any, ...]] = []

        def __getattribute__(self, name: str) -> Any:
            if name in ("events", "__class__"):
                return super().__getattribute__(name)
            return lambda *facts: self.events.append((name, *facts))

    one, other = Recorder(), Recorder()
    both = Watchers(one, other)
    names = [name for name in vars(Watcher) if not name.startswith("_")]
    assert "measured" in names and "stepped" in names
    for name in names:
        getattr(both, name)("task", 1)
    assert one.events == other.events == [(name, "task", 1) for name in names]


# --- docs and dashboard ----------------------------------------------------------------------------------


def test_documented_pipeline_metrics_equal_the_real_ones() -> None:
    documented = table(page("docs/pipeline.md"), "metric", "kind", "labels", "meaning")
    assert documented == [
        [code(name), kind, ", ".join(map(code, labels)), text] for name, (kind, text, labels) in METRICS.items()
    ]


def dashboard() -> dict[str, Any]:
    return json.loads((ROOT / "deploy/grafana/pipeline.json").read_text())


def test_dashboard_shows_every_metric_and_no_unknown_one() -> None:
    shown = set()
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            for name, labels in re.findall(r"\b(headwater_\w+)(?:\{(.*?)\})?", target["expr"]):
                known = name if name in METRICS else re.sub(r"_(bucket|sum|count)$", "", name)
                assert known in METRICS, f"{panel['title']}: {name}"
                assert (known == name) == (METRICS[known][0] != "histogram"), f"{panel['title']}: {name}"
                assert set(re.findall(r"(\w+)=~?\"", labels)) <= {*METRICS[known][2]}
                shown.add(known)
    assert shown == set(METRICS)


def test_dashboard_groups_and_names_series_by_labels_of_their_metrics() -> None:
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            (name, *_) = re.findall(r"headwater_\w+", target["expr"])
            labels = {"le", *METRICS[name if name in METRICS else name.removesuffix("_bucket")][2]}
            grouped = [each.strip() for by in re.findall(r"by \((.*?)\)", target["expr"]) for each in by.split(",")]
            assert {*grouped, *re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])} <= labels, panel["title"]


def test_dashboard_panels_have_own_numbers_and_the_chosen_data_source() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["datasource"]["uid"] == "${datasource}" and panel["description"] for panel in panels)
    (query,) = (each["query"] for each in dashboard()["templating"]["list"] if each["name"] == "pipeline")
    assert re.fullmatch(r"label_values\((\w+), pipeline\)", query)[1] in METRICS  # type: ignore[index]
