"""The driver of every nemesis: its schedule, its journal of events, and runs in which nothing happened."""

from __future__ import annotations

from random import Random

import pytest
from tests.guarantees.fault_driver import FaultDriver, ServerFaults


class Counted(ServerFaults, FaultDriver):
    """A system that does one unit of work at a time, and none after the event `break`."""

    done = 0

    def __init__(self, *schedule: str) -> None:
        super().__init__("seed of the test", Random(0))
        self.schedule, self.journal, self.kept = schedule, list[str](), list[bool]()

    def let_work(self) -> None:
        self.done += "break" not in self.events
        self.journal.append("work")

    def do_break(self) -> None:
        self.journal.append("break")

    def do_change_nothing(self) -> None:
        self.journal.append("change nothing")

    def check(self) -> None:
        self.journal.append("check")

    def last_words(self) -> str:
        return "last words"

    def close(self, *, keep: bool = False) -> None:
        self.kept.append(keep)

    def _run(self) -> None:
        self.drive(self.schedule)


def test_work_is_done_before_between_and_after_events() -> None:
    driver = Counted("change nothing", "change nothing")
    driver.run()
    assert driver.journal == ["work", *["change nothing", "check", "work"] * 2]
    assert driver.events == ["change nothing", "change nothing"] and driver.kept == [False]


def test_run_without_work_between_two_events_fails() -> None:
    driver = Counted("change nothing", "break", "change nothing")
    with pytest.raises(AssertionError, match="nothing happened after break"):
        driver.run()
    assert driver.journal[-3:] == ["break", "check", "work"] and driver.kept == [True]


def test_failure_names_the_seed_the_events_and_the_last_words() -> None:
    with pytest.raises(AssertionError) as failure:
        Counted("change nothing", "break").run()
    text = str(failure.value)
    assert "seed 'seed of the test' failed" in text and "events: change nothing, break" in text and "last words" in text
