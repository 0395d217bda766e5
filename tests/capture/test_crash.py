"""kill -9 at every step between the user's file and the log: no loss, no repeat, no offset used twice."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.capture.captured_database import foreign, logged
from tests.suite.deadlines import PATIENCE

from headwater.log.disk.disk_log import DiskLog
from headwater.model.change import Op, Transaction

ROOT = Path(__file__).parent.parent.parent
ROUNDS = 25

# In the order of the way of a change: commit, stage, clock, log, acknowledge, trim, housekeeping.
STEPS = (
    "Writer._commit",
    "Writer._settle",
    "LiveLog.stage",
    "DiskLog.raise_ceiling",
    "LiveLog.flush",
    "DiskLog.append",
    "SqliteSource.acknowledge",
    "Trimmer._begin",
    "DiskLog.set_notes",
    "Trimmer._delete",
    "Trimmer._collect",
    "RetainedBlocks.retain",
    "RetainedBlocks.merge",
)
BEGINNING = ("SqliteSource.prove", "SqliteSource._install", "Trimmer.start", "Capture._pass")
MOVE = ("Trimmer._begin:after:2", "DiskLog.set_notes:after:3", "Trimmer._delete:after:2", "Trimmer._collect:before:9")


class Crashing:
    """The process whose forks crash."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.capture.crash_process"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.stop)

    def __call__(self, arguments: list[str | int]) -> int:
        """Run one fork to its end and return how it ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def stop(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        self._process.stdout.close()


@functools.cache
def crashing() -> Crashing:
    """Return the process of this pytest worker whose forks crash."""
    return Crashing()


class Story:
    """Runs one scenario over several crashes and collects what every process reported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: set[int] = set()
        self.read: dict[int, tuple[int, int]] = {}  # offset to (time, transaction)
        self.generations: set[str] = set()
        self.closed: tuple[int, int] = (0, 0)  # the newest checkpoint anybody saw
        self.checkpoints = 0

    def run(self, point: str = "none", *, skew_ms: int = 0, rounds: int = ROUNDS) -> None:
        """Run one process; check that it is killed at `point`, or ends with 0 if `point` is "none"."""
        output, errors = self.folder / "output", self.folder / "errors"
        code = crashing()([str(self.folder), point, skew_ms, rounds, str(output), str(errors)])
        expected = 0 if point == "none" else -signal.SIGKILL
        assert code == expected, f"{point} ended with {code}\n{errors.read_text()[-2000:]}"
        said = output.read_text()
        output.unlink()
        for line in said.splitlines():
            self._take(*line.split())

    def _take(self, word: str, *rest: str) -> None:
        if word == "generation":
            self.generations.add(rest[0])
        elif word == "told":
            self.told.add(int(rest[0]))
        elif word == "closed":
            ts, offset = map(int, rest)
            assert (ts, offset) >= self.closed, f"the closed time went back from {self.closed} to {ts}, {offset}"
            self.checkpoints += (ts, offset) != self.closed
            self.closed = (ts, offset)
        else:
            offset, ts, number = map(int, rest)
            assert ts > self.closed[0] or offset <= self.closed[1], f"{offset} has {ts}, closed was {self.closed}"
            before = self.read.setdefault(offset, (ts, number))
            assert before[1] == number, f"offset {offset} was transaction {before[1]} and is now {number}"

    def check(self) -> None:
        """Check that the log agrees with every report and every read of the scenario."""
        parts = logged(self.folder)
        assert len(self.generations) == 1, f"a needless new generation: {self.generations}"
        _check_order(parts)
        found = _numbers(parts)
        assert set(found) >= self.told, "an acknowledged transaction is not in the log"
        assert all(offsets == list(range(offsets[0], offsets[0] + 3)) for offsets in found.values()), "torn or repeated"
        for offset, (_, number) in self.read.items():
            assert offset in found[number], f"offset {offset} was read as transaction {number}"
        assert sorted(found) == list(range(1, max(found) + 1)), "transactions are missing"


def _check_order(parts: Iterable[Transaction]) -> None:
    after, ts = 0, 0
    for part in parts:
        assert part.first == after + 1, f"{part.first} follows {after}"
        assert part.ts >= ts, f"the time of {part.first} went back"
        after, ts = part.upto, part.ts


def _numbers(parts: Iterable[Transaction]) -> dict[int, list[int]]:
    """Return for each transaction number the offsets of its rows."""
    found: dict[int, list[int]] = {}
    for part in parts:
        for place, change in enumerate(part.changes):
            if change.op is Op.INSERT and change.after is not None:
                found.setdefault(int(str(change.after[0])), []).append(part.first + place)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_kill_9_at_every_step_of_capture_loses_and_repeats_no_change(tmp_path: Path, step: str, when: str) -> None:
    story = Story(tmp_path)
    story.run(f"{step}:{when}:{1 if step == 'DiskLog.raise_ceiling' else 3}")
    story.run(f"{step}:{when}:1")
    story.run()
    story.check()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", BEGINNING)
def test_kill_9_at_every_step_of_the_start_loses_and_repeats_no_change(tmp_path: Path, step: str, when: str) -> None:
    story = Story(tmp_path)
    story.run(f"{step}:{when}:1")
    story.run(rounds=3)
    for _ in range(2) if step != "SqliteSource._install" else ():
        story.run(f"{step}:{when}:1")
    story.run()
    story.check()


@pytest.mark.slow
@pytest.mark.parametrize("second", MOVE)
@pytest.mark.parametrize("first", MOVE)
def test_three_kills_during_trims_keep_the_generation_and_every_change(tmp_path: Path, first: str, second: str) -> None:
    story = Story(tmp_path)
    for point in (first, second, first):
        story.run(point)
    story.run()
    story.check()


@pytest.mark.slow
def test_commit_times_never_decrease_when_the_wall_clock_goes_back(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.run("DiskLog.append:before:5", skew_ms=3_600_000)
    story.run("LiveLog.flush:before:5", skew_ms=-3_600_000)
    story.run(skew_ms=-7_200_000)
    story.check()
    assert story.checkpoints > 10
    times = [story.read[offset][0] for offset in sorted(story.read)]
    assert times == sorted(times), "a reader saw a time, and later offsets got an earlier one"


@pytest.mark.slow
def test_changes_after_a_crash_have_times_above_every_reported_checkpoint(tmp_path: Path) -> None:
    story = Story(tmp_path)
    for point, hours in (
        ("Head.close_at:after:9", 1),
        ("Head.close_at:after:7", -1),
        ("Stamper.tick:after:9", -2),
    ):
        story.run(point, skew_ms=hours * 3_600_000)
    story.run(skew_ms=-3 * 3_600_000)
    story.check()
    assert story.checkpoints > 10
    parts = logged(tmp_path)
    assert all(part.ts > story.closed[0] for part in parts if part.first > story.closed[1])


@pytest.mark.slow
def test_interrupted_start_of_a_new_generation_is_completed_by_the_next_start(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.run(rounds=5)
    before = logged(tmp_path)[-1].upto
    for path in tmp_path.glob("app.log.db*"):
        os.unlink(path)
    for place in ("SqliteSource._install", "DiskLog.restart"):
        for point in ("before:1", "after:1"):
            story.run(f"{place}:{point}")
    story.run(rounds=5)
    found = logged(tmp_path)
    assert found[0].first > before + 1 and _numbers(found).keys() == {6, 7, 8, 9, 10}


@pytest.mark.slow
def test_rows_durable_before_a_crash_have_their_changes_in_the_log_after_it(tmp_path: Path) -> None:
    # SkeinDB saved the rows first and its change log afterwards, best effort: a crash between lost the changes.
    story = Story(tmp_path)
    story.run("Writer._settle:before:4")
    foreign(tmp_path / "app.db", "INSERT INTO t VALUES (1000, 1), (1000, 2), (1000, 3)")
    log = DiskLog.open(tmp_path / "app.log.db", read_only=True)
    behind = log.latest
    log.close()
    story.run(rounds=1)
    parts = logged(tmp_path)
    assert parts[-1].upto > behind
    _check_order(parts)
    assert 1000 in _numbers(parts) and set(_numbers(parts)) >= story.told


@pytest.mark.slow
def test_two_kills_around_a_trim_keep_the_generation(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.run(rounds=5)
    log = DiskLog.open(tmp_path / "app.log.db")
    last = log.note("nonce")
    log.set_notes(nonce="of the move before", pending_nonce=last)  # as a kill right after the move leaves it
    log.close()
    story.run("Trimmer._delete:before:1")
    story.run()
    story.check()
