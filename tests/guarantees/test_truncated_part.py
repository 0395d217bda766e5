"""Exactly once at the sink: a part whose stream breaks off is never loaded as complete."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.guarantees.pipeline_process import children, command_of, kill
from tests.pipeline.table_model import Gate
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.pipeline.sinks.delta.delta import DeltaSink, Settings

pytestmark = pytest.mark.spark

ROWS = 25_000  # more than Spark hands to a task at a time: when it dies, two such lots are with the task
LOADER = """
import sys
from pathlib import Path
from tests.pipeline.table_model import Gate, Story, row
from headwater.model.keys.key import Span
from headwater.pipeline.spark.session import open_session
from headwater.pipeline.sinks.delta.delta import DeltaSink, Settings
from headwater.pipeline.sinks.sink import Part

place, rows = sys.argv[1], int(sys.argv[2])
gate = object.__new__(Gate)
gate.paths = sys.argv[3:]
story, sink = Story(), DeltaSink(Settings(place))
story.rows_at = [{key: row(key) for key in range(rows)}]
part = Part(Span.all(), 0)
plan = story.plan("p1", [part.span])
sink.begin(plan)
sink.load(story.loading(open_session(name="cut off", short_lived=True), [part], gate, ends=True), plan, [part])
"""


DAEMON = "-m headwater.pipeline.spark.worker_daemon"  # and the workers, which it forks


@pytest.mark.soak(seconds=40, every_time=True)
def test_part_is_not_loaded_when_spark_is_killed_while_a_task_writes_it(tmp_path: Path) -> None:
    place, gate = str(tmp_path / "lake"), Gate(tmp_path)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(["src", "."])}
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", LOADER, place, str(ROWS), *gate.paths]
    loader = subprocess.Popen(command, env=env, cwd=root, stderr=subprocess.PIPE, text=True)
    below: list[int] = []
    try:
        gate.reached()
        below = children(loader.pid)
        java = [pid for pid in below if "java" in command_of(pid).split(" ")[0]]
        parent, *workers = [pid for pid in below if DAEMON in command_of(pid)]
        assert java and len(workers) == 2, "the one that makes the rows, and the task"
        kill(parent, *java)  # the parent too: else it may be faster than the task, and ends it
        wait_until(lambda: sum(DAEMON in command_of(pid) for pid in workers) == 1)  # which is at the gate
        state = DeltaSink(Settings(place)).state()
        assert state is not None and state.missing == list(state.plan.spans)
        assert "Spark's Java process is gone" in loader.communicate(timeout=PATIENCE)[1]
    finally:
        kill(*below, loader.pid)
        loader.wait(PATIENCE)
