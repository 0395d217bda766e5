"""Pytest plugin: one base seed for all random tests of a run, and how to repeat a failure.

`SOAK_SEED=abcd1234` repeats a run; without it the base is fresh. `make test` and the header of pytest print it. Every
random test takes the fixture `fresh_seed` (text) or `fresh_number`, which are the base and the test's own name
together: the same test under the same base always gets the same seed, whichever other tests run beside it.
"""

import hashlib
import os
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

VARIABLE = "SOAK_SEED"
EXACT = "EXACT_SEED"  # gives every random test this very seed: for seeds on record


def pytest_configure() -> None:
    # Workers inherit the environment of the process that starts them, so all of them have one base.
    os.environ.setdefault(VARIABLE, secrets.token_hex(4))


def pytest_report_header() -> str:
    return f"random tests: {VARIABLE}={os.environ[VARIABLE]}"


@pytest.fixture
def fresh_seed(request: pytest.FixtureRequest) -> str:
    """Return the seed of this test in this run."""
    return seed_of(request.node.nodeid)


@pytest.fixture
def fresh_number(fresh_seed: str) -> int:
    """Return the seed of this test in this run, as a number of 40 bits."""
    return number_of(fresh_seed)


def seed_of(node: str) -> str:
    """Return the seed of a test id under the base of this run."""
    return os.environ.get(EXACT) or hashlib.sha256(f"{os.environ[VARIABLE]} {node}".encode()).hexdigest()[:10]


def number_of(seed: str) -> int:
    """Return a seed's number of 40 bits."""
    return int(hashlib.sha256(seed.encode()).hexdigest()[:10], 16)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    is_random = "fresh_seed" in getattr(item, "fixturenames", ())
    if report.failed and (is_random or any(map(item.get_closest_marker, ("soak", "hypothesis")))):
        report.sections.append(("to repeat this test", command_to_repeat(item)))
    return report


def command_to_repeat(item: pytest.Item) -> str:
    """Return the command that runs a test with the seeds and the budget of this run."""
    variables = (VARIABLE, EXACT, "HYPOTHESIS_PROFILE", "SOAK_SEEDS")
    words = [f"{name}={os.environ[name]}" for name in variables if os.environ.get(name)]
    words.append(".venv/bin/python -m pytest")
    if item.get_closest_marker("soak"):
        words.append("-m soak --timeout 7200")
    seed = item.config.getoption("hypothesis_seed", None)
    if seed is not None and item.get_closest_marker("hypothesis"):
        words.append(f"--hypothesis-seed {seed}")
    return " ".join([*words, f"'{item.nodeid}'"])
