"""The runner of the suite: which parts there are, and what is reported of them."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from tests.suite import run
from tests.suite.run import Part, Running, clock, parts, report, wait


@pytest.fixture(autouse=True)
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "OUTPUT", tmp_path)


def running(name: str, script: str, outcome: str = "") -> Running:
    """Run a script as a part; with an outcome it left the timings of one test."""
    part = Part(name, [sys.executable, "-c", script])
    if outcome:
        test = {"setup": 0.0, "call": 2.5, "teardown": 0.0, "outcome": outcome}
        part.timings.write_text(json.dumps({"wall": 1.0, "tests": {f"tests/a.py::test_{name}": test}, "fixtures": {}}))
    return Running(part)


def test_full_run_has_the_parts_spark_tests_lint_and_types() -> None:
    assert [part.name for part in parts()] == ["spark", "tests", "lint", "types"]


def test_tests_that_need_spark_are_in_the_rooms_of_spark() -> None:
    marked = [path for path in run.ROOT.glob("tests/**/test_*.py") if "mark.spark" in path.read_text()]
    homes = tuple(str(run.ROOT / room) for room in run.SPARK_ROOMS)
    assert len(marked) > 5
    assert [path for path in marked if not str(path).startswith(homes) and path.name != "test_run.py"] == []


def test_run_of_one_room_has_only_its_tests() -> None:
    found = parts(["feeds"])
    assert [part.name for part in found] == ["spark", "tests"]
    assert all(part.command[-1] == "tests/feeds" for part in found)


def test_fast_parts_leave_slow_tests_out() -> None:
    tests, *others = parts(fast=True)
    assert "not slow and not spark and not soak" in tests.command
    assert [part.name for part in others] == ["lint", "types"]


def test_failed_part_is_named_with_its_failed_tests_and_the_counts_come_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = running("good", "print('1 passed in 0.1s')", "passed")
    bad = running("bad", "print('FAILED tests/a.py::test_bad\\n1 failed in 0.1s'); exit(1)", "failed")
    wait([good, bad])
    assert good.passed and not bad.passed
    lines = list(report([good, bad], 61.0))
    assert any(line.startswith("bad     FAILED") for line in lines)
    assert "FAILED tests/a.py::test_bad" in lines
    assert lines[-1].strip() == "1 passed, 1 failed, 0 skipped"
    assert "1 failed in 0.1s" in capsys.readouterr().out, "the output of a part is printed when it ends"


def test_report_says_how_busy_the_cores_were() -> None:
    assert re.fullmatch(r"(cores: \d+ % busy, \d+ % idle, \d+ % taken by others)?", str(run.Cores()))
    assert "all                 1:01   cores: 90 % busy\n\n=== the ten slowest tests" in report(
        [], 61.0, "cores: 90 % busy"
    )


@pytest.mark.parametrize("may_be_empty", [True, False])
def test_part_without_tests_passes_only_for_one_room(may_be_empty: bool) -> None:
    ended = Running(Part("spark", [sys.executable, "-c", "exit(5)"], may_be_empty))
    wait([ended])
    assert ended.passed == may_be_empty
    assert all(part.may_be_empty for part in parts(["feeds"]))
    assert not any(part.may_be_empty for part in (*parts(), *parts(fast=True)))


def test_part_that_still_runs_is_stopped() -> None:
    endless = running("endless", "import time; time.sleep(600)")
    endless.stop()
    assert endless.is_over() and not endless.passed


def test_part_has_its_own_variables_and_those_of_the_runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHARED", "shared")
    script = "import os, tempfile; print(os.environ['SHARED'], tempfile.gettempdir())"
    part = Running(Part("own", [sys.executable, "-c", script], env={"TMPDIR": str(tmp_path)}))
    wait([part])
    assert part.text.split() == ["shared", str(tmp_path)]
    assert [part.name for part in parts(env={"TMPDIR": "x"}) if part.env] == ["tests"]
    assert [part.name for part in parts(env={"TMPDIR": "x"}, fast=True) if part.env] == ["tests"]


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that takes the place of /dev/shm, on a machine with much memory."""
    (info := tmp_path / "meminfo").write_text("MemTotal: 32000000 kB\nMemAvailable: 16000000 kB\n")
    (folder := tmp_path / "shm").mkdir()
    monkeypatch.setattr(run, "MEMORY", folder)
    monkeypatch.setattr(run, "MEMORY_INFO", info)
    monkeypatch.setattr(run, "MIN_SPACE", 1)
    return folder


def test_memory_folder_is_removed_if_all_passed_and_kept_if_not(memory: Path) -> None:
    (memory / "headwater-tests-99999999").mkdir()  # of a run that has ended: no process has such a number
    (memory / f"headwater-tests-{os.getppid()}").mkdir()
    folder = run.MemoryFolder()
    assert folder.path is not None and folder.env() == {"TMPDIR": str(folder.path)}
    assert sorted(memory.iterdir()) == sorted([folder.path, memory / f"headwater-tests-{os.getppid()}"])
    (folder.path / "file").touch()
    assert str(folder.path) in folder.remove(passed=False) and (folder.path / "file").exists()
    assert folder.remove(passed=True) == "" and not folder.path.exists()


@pytest.mark.parametrize("lacking", ["space", "memory", "folder", "exec"])
def test_machine_with_too_little_memory_keeps_the_files_of_tests_on_disk(
    memory: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    if lacking == "space":
        monkeypatch.setattr(run, "MIN_SPACE", 1 << 62)
    elif lacking == "memory":
        run.MEMORY_INFO.write_text("MemAvailable: 4000000 kB\n")
    elif lacking == "folder":
        memory.rmdir()
    else:
        found = os.statvfs(memory)
        noexec = os.statvfs_result([*found[:8], found.f_flag | os.ST_NOEXEC, *found[9:]])
        monkeypatch.setattr(os, "statvfs", lambda path: noexec)
    folder = run.MemoryFolder()
    assert (folder.path, folder.env(), folder.remove(passed=False)) == (None, {}, "")


def test_clock_has_minutes_and_seconds() -> None:
    assert [clock(seconds) for seconds in (0, 59.9, 61, 3600)] == ["0:00", "0:59", "1:01", "60:00"]
