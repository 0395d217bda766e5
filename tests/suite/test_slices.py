"""Slices of the soak suites: chosen by a seed, within the time, every file in turn."""

from tests.suite.slices import choose

FILES = {"a": 10.0, "b": 60.0, "c": 100.0}
TESTS = [(f"{file}::{n}", file, seconds) for file, seconds in FILES.items() for n in range(30)]


def seconds(chosen: list[str]) -> float:
    known = {node: taken for node, _, taken in TESTS}
    return sum(known[node] for node in chosen)


def test_chosen_tests_take_at_most_the_given_seconds() -> None:
    for budget in (5, 100, 1_000, 100_000):
        assert seconds(list(choose(TESTS, "x", budget))) <= budget


def test_all_tests_are_chosen_when_there_is_time_for_all() -> None:
    assert sorted(choose(TESTS, "x", 1e9)) == sorted(node for node, _, _ in TESTS)


def test_first_chosen_tests_are_of_different_files() -> None:
    files = [node.partition("::")[0] for node in choose(TESTS, "x", 600)]
    assert {"a", "b", "c"} == set(files)
    assert sorted(files[:3]) == ["a", "b", "c"]


def test_same_seed_chooses_the_same_tests_and_another_seed_other_tests() -> None:
    assert choose(TESTS, "x", 600) == choose(list(TESTS), "x", 600)
    assert set(choose(TESTS, "x", 600)) != set(choose(TESTS, "y", 600))


def test_no_test_is_chosen_twice() -> None:
    chosen = choose(TESTS, "z", 2_000)
    assert len(chosen) == len(set(chosen))


def test_tests_of_every_slice_are_chosen_first_and_their_time_is_counted() -> None:
    always = ["c::7", "b::3"]
    for seed in "xyz":
        chosen = list(choose(TESTS, seed, 300, always))
        assert chosen[:2] == always and len(chosen) == len(set(chosen)) and seconds(chosen) <= 300
