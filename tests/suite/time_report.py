"""Show where the time of a test run went: `python -m tests.suite.time_report FILE …` (files that `--timings` wrote)."""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

PHASES = ("setup", "call", "teardown")
Tests = dict[str, dict[str, Any]]


def read(paths: Iterable[Path]) -> tuple[Tests, dict[str, list[float]], dict[str, float]]:
    """Return the tests and fixtures of all runs together, and the seconds of each run."""
    tests: Tests = {}
    fixtures: dict[str, list[float]] = defaultdict(list)
    walls: dict[str, float] = {}
    for path in paths:
        run = json.loads(path.read_text())
        walls[path.stem] = run["wall"]
        tests.update(run["tests"])
        for name, seconds in run["fixtures"].items():
            fixtures[name].extend(seconds)
    return tests, fixtures, walls


def folder_of(node: str) -> str:
    """Return the room of a test id: `tests/feeds/deliver/test_hub.py::test_x` is in `tests/feeds`."""
    return str(Path(node.partition("::")[0]).parent)


def seconds_of(test: dict[str, Any]) -> float:
    """Return the seconds of a test with its set-up and teardown."""
    return sum(test[phase] for phase in PHASES)


def summed(tests: Tests, group: Callable[[str], str]) -> list[tuple[str, int, list[float]]]:
    """Add up the phases per group, the slowest group first."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    counts: dict[str, int] = defaultdict(int)
    for node, test in tests.items():
        counts[group(node)] += 1
        for place, phase in enumerate(PHASES):
            sums[group(node)][place] += test[phase]
    return sorted(((name, counts[name], row) for name, row in sums.items()), key=lambda row: -sum(row[2]))


def slowest(paths: Iterable[Path], count: int) -> Iterator[str]:
    """Yield the slowest tests, a line each."""
    tests = read(paths)[0]
    for node, test in sorted(tests.items(), key=lambda item: -seconds_of(item[1]))[:count]:
        yield f"{seconds_of(test):8.1f} s  {node}"


def outcomes(paths: Iterable[Path]) -> dict[str, int]:
    """Count the tests by outcome: passed, failed, skipped."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for test in read(paths)[0].values():
        counts[test["outcome"]] += 1
    return counts


def report(paths: list[Path], rows: int) -> Iterator[str]:
    """Yield the lines of the profile."""
    tests, fixtures, walls = read(paths)
    for name, seconds in walls.items():
        yield f"{name}: {seconds:.0f} s"
    whole = sum(map(seconds_of, tests.values()))
    yield f"{len(tests)} tests, {whole:.0f} s of test time\n\n   total   setup    call teardown  tests  folder"
    for name, count, row in summed(tests, folder_of):
        yield f"{sum(row):8.1f}{row[0]:8.1f}{row[1]:8.1f}{row[2]:9.1f}{count:7}  {name}"
    yield "\n   total  tests  file"
    for name, count, row in summed(tests, lambda node: node.partition("::")[0])[:rows]:
        yield f"{sum(row):8.1f}{count:7}  {name}"
    yield "\n   total  times  fixture"
    for name, each in sorted(fixtures.items(), key=lambda item: -sum(item[1]))[:rows]:
        yield f"{sum(each):8.1f}{len(each):7}  {name}"
    yield "\n   total    test"
    yield from slowest(paths, rows)


if __name__ == "__main__":
    for line in report([Path(name) for name in sys.argv[1:]], rows=40):
        print(line)
