"""Pytest plugin: `--slices SECONDS` runs a part of the selected tests that takes about so long, chosen by a seed.

The soak suites take hours. CI runs a slice of them after every submission: which tests, and with which random seeds,
follows from the commit, so every suite gets its turn and a failing slice can be repeated exactly.
A test says how long it takes by `@pytest.mark.soak(seconds=90)`; one with `every_time=True` is in every slice.
"""

import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import pytest
from tests.suite.seeds import VARIABLE

SOAK_SECONDS = 60.0  # of a soak test that does not say
STARTING = 0.9  # of the time is for the tests themselves
PROPERTY_SECONDS = 10.0  # of a property test with the examples of the profile `soak`


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slices", metavar="SECONDS", type=float, help="run about so many seconds of the selected tests")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--slices"):
        config.pluginmanager.register(Slices(config.getoption("--slices")), "slices")


class Slices:
    """Deselect all but the chosen tests; those of every slice run first, others that have not started when the time
    is over are skipped."""

    def __init__(self, budget: float) -> None:
        self._budget, self._end = budget, time.monotonic() + budget

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        timed = [(item.nodeid, str(item.path), seconds_of(item)) for item in items]
        always = [item.nodeid for item in items if is_in_every_slice(item)]
        chosen = choose(timed, os.environ[VARIABLE], self._budget, always)
        left_out = [item for item in items if item.nodeid not in chosen]
        items[:] = sorted((item for item in items if item.nodeid in chosen), key=_order(chosen, always))
        config.hook.pytest_deselected(items=left_out)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() > self._end and not is_in_every_slice(item):
            pytest.skip("the time of the slices is over")


def _order(chosen: Sequence[str], always: Collection[str]) -> Callable[[pytest.Item], tuple[bool, int]]:
    """Return the key by which tests run: those of every slice, then file by file in the order of the seed."""
    files: dict[str, int] = {}
    for node in chosen:
        files.setdefault(node.partition("::")[0], len(files))
    return lambda item: (item.nodeid not in always, files[item.nodeid.partition("::")[0]])


def seconds_of(item: pytest.Item) -> float:
    """Return how long a test says it takes."""
    mark = item.get_closest_marker("soak")
    return float(mark.kwargs.get("seconds", SOAK_SECONDS)) if mark else PROPERTY_SECONDS


def is_in_every_slice(item: pytest.Item) -> bool:
    """Return whether a test is run whatever the seed."""
    mark = item.get_closest_marker("soak")
    return bool(mark and mark.kwargs.get("every_time"))


def choose(
    timed: Iterable[tuple[str, str, float]], seed: str, budget: float, always: Collection[str] = ()
) -> Sequence[str]:
    """Return ids of tests that take at most `budget` seconds together: those of `always` and, while there is time,
    others; files take turns, in an order by the seed. Some of the time is left for starting what they need."""
    dice, budget = random.Random(seed), STARTING * budget
    files: dict[str, list[tuple[str, float]]] = defaultdict(list)
    chosen = list(always)
    for node, file, seconds in timed:
        if node in always:
            budget -= seconds
        else:
            files[file].append((node, seconds))
    queues = [dice.sample(tests, len(tests)) for _, tests in sorted(files.items())]
    dice.shuffle(queues)
    for node, seconds in _in_turns(queues):
        if seconds <= budget:
            budget -= seconds
            chosen.append(node)
    return chosen


def _in_turns(queues: list[list[tuple[str, float]]]) -> Iterator[tuple[str, float]]:
    while queues:
        for queue in queues:
            yield queue.pop()
        queues = [queue for queue in queues if queue]
