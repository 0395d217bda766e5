"""Pytest plugin: record how long every test and every fixture takes, and print where the time went.

`--timings FILE` writes one JSON document per run; `python -m tests.suite.time_report FILE …` adds several up.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FIXTURES = "fixture_seconds"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--timings", metavar="FILE", help="write the seconds of every test and fixture as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FixtureTimer(), "fixture-timer")
    if config.getoption("--timings") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(TimingsFile(Path(config.getoption("--timings"))), "timings-file")


class FixtureTimer:
    """Measure the set-up of each fixture without the fixtures it asks for."""

    def __init__(self) -> None:
        self._nested: list[float] = []
        self._seconds: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        began = time.perf_counter()
        self._nested.append(0.0)
        try:
            return (yield)
        finally:
            whole = time.perf_counter() - began
            own = whole - self._nested.pop()
            if self._nested:
                self._nested[-1] += whole
            self._seconds[f"{fixturedef.baseid}::{fixturedef.argname}"] += own

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
        report = yield
        if call.when == "setup" and self._seconds:
            # `user_properties` is what a worker's report carries to the process that writes the file.
            report.user_properties.append((FIXTURES, {name: round(s, 4) for name, s in self._seconds.items()}))
            self._seconds.clear()
        return report


class TimingsFile:
    """Collect the reports of all workers and write them when the run ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = time.time()
        self._tests: dict[str, dict[str, Any]] = {}
        self._fixtures: dict[str, list[float]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(report.nodeid, {"setup": 0.0, "call": 0.0, "teardown": 0.0})
        test[report.when or "call"] = round(report.duration, 4)
        test["start"] = min(test.get("start", report.start), report.start)
        if report.when == "call" or report.outcome != "passed":
            test["outcome"] = report.outcome
        if report.when == "setup":
            for name, value in report.user_properties:
                if name == FIXTURES:
                    for fixture, seconds in value.items():
                        self._fixtures[fixture].append(seconds)

    def pytest_sessionfinish(self) -> None:
        wall = round(time.time() - self._began, 1)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"wall": wall, "tests": self._tests, "fixtures": self._fixtures}))
