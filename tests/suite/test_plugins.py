"""The plugins of the suite, in runs of pytest of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PLUGINS = "pytest_plugins = ('tests.suite.seeds', 'tests.suite.slices', 'tests.suite.timings')\n"
RANDOM = """
def test_random(fresh_seed, fresh_number):
    print(f"seed is {fresh_seed} {fresh_number}")
    assert not fresh_seed
"""

MANY = """
import os, pytest, time

@pytest.mark.soak(seconds=10)
@pytest.mark.parametrize("n", range(9))
def test_x(n):
"""


XDIST = ("-p", "xdist.plugin", "-n", "2")
HYPOTHESIS = ("-p", "_hypothesis_pytestplugin")


def run(folder: Path, tests: str, *options: str, **variables: str) -> str:
    """Run the tests of a text and return what pytest printed.

    Of the installed plugins, load only those that `options` name: loading all of them takes a second.
    """
    (folder / "conftest.py").write_text(PLUGINS)
    (folder / "test_it.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = soak\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(folder), *options]
    environment = {"PATH": "/usr/bin", "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **variables}
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True).stdout


def seed_in(output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith("seed is"))


def test_failed_random_test_prints_the_command_that_repeats_it(tmp_path: Path) -> None:
    output = run(tmp_path, RANDOM)
    base = next(line for line in output.splitlines() if line.startswith("random tests: ")).partition(": ")[2]
    assert f"{base} .venv/bin/python -m pytest 'test_it.py::test_random'" in output
    assert seed_in(run(tmp_path, RANDOM, SOAK_SEED=base.partition("=")[2])) == seed_in(output)
    assert seed_in(run(tmp_path, RANDOM)) != seed_in(output)


def test_exact_seed_is_given_to_the_test_unchanged(tmp_path: Path) -> None:
    assert seed_in(run(tmp_path, RANDOM, EXACT_SEED="5ea1c039")).startswith("seed is 5ea1c039 ")


def test_workers_of_one_run_have_one_base_seed(tmp_path: Path) -> None:
    output = run(tmp_path, MANY + "    assert 0, os.environ['SOAK_SEED']\n", *XDIST)
    bases = {line.rpartition(" ")[2] for line in output.splitlines() if line.startswith("E       AssertionError: ")}
    assert len(bases) == 1, output


def test_slices_run_some_tests_and_deselect_the_others(tmp_path: Path) -> None:
    many = (
        "import pytest\n@pytest.mark.soak(seconds=10)\n@pytest.mark.parametrize('n', range(9))\ndef test_x(n): pass\n"
    )
    assert "4 passed, 5 deselected" in run(tmp_path, many, "--slices", "45")


def test_slices_run_what_is_in_every_slice_first_and_after_their_time(tmp_path: Path) -> None:
    tests = """
import pytest, time

@pytest.mark.soak(seconds=0.1)
def test_a():
    time.sleep(2)

@pytest.mark.soak(seconds=0.1, every_time=True)
@pytest.mark.parametrize("n", range(3))
def test_b(n):
    time.sleep(0.8)
"""
    output = run(tmp_path, tests, "--slices", "1", "-v")
    ran = [line.split()[1] for line in output.splitlines() if line.startswith("test_it.py::")]
    assert "3 passed, 1 skipped" in output and ran == ["PASSED"] * 3 + ["SKIPPED"], output


def test_failed_property_test_prints_seed_and_budget(tmp_path: Path) -> None:
    tests = """
from hypothesis import given, strategies as st

@given(st.integers())
def test_it(n):
    assert n < 100
"""
    output = run(tmp_path, tests, *HYPOTHESIS, "--hypothesis-seed", "77", HYPOTHESIS_PROFILE="soak", SOAK_SEED="ab")
    command = (
        "SOAK_SEED=ab HYPOTHESIS_PROFILE=soak .venv/bin/python -m pytest --hypothesis-seed 77 'test_it.py::test_it'"
    )
    assert command in output, output


def test_property_tests_of_soak_try_other_examples_each_time() -> None:
    code = "import tests.conftest; from hypothesis import settings; print(settings().derandomize)"
    for profile, derandomized in (("soak", "False"), ("ci", "True")):
        environment = {"PATH": "/usr/bin", "PYTHONPATH": str(ROOT), "HYPOTHESIS_PROFILE": profile}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == derandomized
    conftests = [path for path in (ROOT / "tests").rglob("conftest.py") if "load_profile" in path.read_text()]
    assert conftests == [ROOT / "tests" / "conftest.py"], "a room that loads another profile changes it for all"


def test_slices_skip_what_has_not_started_in_time(tmp_path: Path) -> None:
    slow = MANY.replace("seconds=10", "seconds=100") + "    time.monotonic = lambda now=time.monotonic(): now + 2000\n"
    assert "1 passed, 8 skipped" in run(tmp_path, slow, "--slices", "1000")


@pytest.mark.parametrize("options", [(), XDIST])
def test_timings_name_tests_fixtures_and_outcomes(tmp_path: Path, options: tuple[str, ...]) -> None:
    tests = """
import pytest, time
@pytest.fixture
def inner(): time.sleep(0.2)
@pytest.fixture
def outer(inner): time.sleep(0.1)
def test_good(outer): time.sleep(0.3)
def test_bad(): assert False
def test_left_out(): pytest.skip("no")
"""
    run(tmp_path, tests, "--timings", str(tmp_path / "t.json"), *options)
    found = json.loads((tmp_path / "t.json").read_text())
    outcomes = {node.partition("::")[2]: test["outcome"] for node, test in found["tests"].items()}
    assert outcomes == {"test_good": "passed", "test_bad": "failed", "test_left_out": "skipped"}
    good = found["tests"]["test_it.py::test_good"]
    assert good["setup"] >= 0.3 and good["call"] >= 0.3
    [inner], [outer] = found["fixtures"]["test_it.py::inner"], found["fixtures"]["test_it.py::outer"]
    assert inner >= 0.2 and 0.1 <= outer < good["setup"] - 0.15, "the fixture it asks for is not counted"
