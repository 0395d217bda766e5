"""The foreach sink: functions by name, and what is sent again when the ledger was not written."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from tests.pipeline.sinks.sql_parquet_foreach_targets import Book
from tests.pipeline.table_model import SPANS, Story, row

from headwater.errors import ConfigError, SinkUnfit
from headwater.pipeline.sinks.foreach import ForeachSink, find_function, open_foreach
from headwater.pipeline.sinks.registry import is_exactly_once
from headwater.pipeline.sinks.sink import Part, Step

taken: list[Any] = []


def take(frame: DataFrame, work: Any, table: Any) -> None:
    """A foreach function as a pipeline file names it."""
    taken.append((sorted(row.id for row in frame.collect()), work, table.name))


def test_foreach_function_from_the_settings_receives_rows_then_changes(spark: SparkSession) -> None:
    taken.clear()
    story = Story()
    for key in (1, 100):
        story.insert(row(key))
    needs: Any = SimpleNamespace(name="p/db/t", ledger=Book())
    sink = open_foreach({"function": f"{__name__}:take"}, needs)
    plan, parts = story.plan("p"), [Part(span, 2) for span in SPANS]
    sink.begin(plan)
    sink.load(story.loading(spark, parts[1:]), plan, parts[1:])
    sink.load(story.loading(spark, parts), plan, parts)  # the second part is there already
    story.delete(1)
    step = story.step(plan, 2, 3)
    sink.apply(story.changes(spark, 2, 3), step, story.table)
    sink.apply(story.changes(spark, 2, 3), step, story.table)
    assert taken == [([100], parts[1:], "t"), ([1], parts, "t"), ([1], step, "t")]
    assert not is_exactly_once("foreach")
    for act in (lambda: sink.rows(spark), lambda: sink.apply(None, Step("p", "g1", 3, 3, repair=True), story.table)):  # type: ignore[arg-type]
        with pytest.raises(SinkUnfit):
            act()


def test_parts_sent_to_a_failed_foreach_function_are_sent_again(spark: SparkSession) -> None:
    story = Story()
    story.insert(row(1))
    seen: list[int] = []

    def fail_once(frame: DataFrame, work: Any, table: Any) -> None:
        seen.append(frame.count())
        if len(seen) == 1:
            raise RuntimeError("the place is not there")

    sink = ForeachSink("foreach", Book(), fail_once)
    plan, parts = story.plan("p"), [Part(span, 1) for span in SPANS]
    sink.begin(plan)
    for _ in range(2):
        try:
            sink.load(story.loading(spark, parts), plan, parts)
        except RuntimeError:
            state = sink.state()
            assert state and state.loaded == {}
    assert seen == [1, 1]


def test_foreach_function_is_imported_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_the_file.py").write_text("def take(frame, work, table): return 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [])
    assert find_function("beside_the_file:take")(None, [], None) == 7  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["", "os", "os:", "no_such_module_here:f", "os:no_such_function", "os:sep"])
def test_unknown_foreach_function_is_refused(place: str) -> None:
    with pytest.raises(ConfigError):
        find_function(place)
