"""Comparing the test ids of two collections."""

from tests.suite.compare_ids import report

BEFORE = {"tests/a.py::test_x[1]", "tests/a.py::test_x[2]", "tests/a.py::test_y", "tests/a.py::test_same"}
AFTER = {"tests/a.py::test_x[1]", "tests/a.py::test_z", "tests/a.py::test_same"}


def test_removed_and_added_test_ids_are_listed() -> None:
    assert list(report(BEFORE, AFTER)) == [
        "4 ids before, 3 after",
        "changed  tests/a.py::test_x: 2 -> 1, without tests/a.py::test_x[2]",
        "gone     tests/a.py::test_y (1)",
        "new      tests/a.py::test_z (1)",
    ]
