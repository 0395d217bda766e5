"""Prepared queries: ids derived from the text, persistence over restarts and kill -9, and limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.errors import HeadwaterError, InvalidRequest, LimitExceeded, LogDamaged, NotFound
from headwater.model.principal import EDITOR, OWNER, VIEWER
from headwater.model.query.query import MAX_TEXT
from headwater.queries.dependencies.instances import instance_key, named_args
from headwater.queries.prepared import PreparedQueries, query_id
from headwater.queries.queries import transient_query


def opened(folder: Path, most: int = 100) -> PreparedQueries:
    return PreparedQueries.open(folder / "queries.db", most=most)


def test_query_prepared_twice_has_one_entry_whose_id_survives_a_restart(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    one = kept.add("main", "SELECT 1", name="first")
    assert kept.add("main", "SELECT 1") == one and kept.count == 1
    renamed = kept.add("main", "SELECT 1", name="second")
    assert (renamed.id, renamed.name, kept.get(one.id)) == (one.id, "second", renamed)
    assert one.id == query_id("main", "SELECT 1") == transient_query("SELECT 1", None).id
    assert kept.add("other", "SELECT 1").id != one.id != kept.add("main", "SELECT  1").id
    kept.close()
    again = opened(tmp_path)
    assert again.get(one.id) == renamed and again.count == 3
    again.drop_database("main")
    assert again.count == 1
    with pytest.raises(NotFound):
        again.get(one.id)
    again.close()


def test_number_and_length_of_prepared_queries_are_limited(tmp_path: Path) -> None:
    kept = opened(tmp_path, most=1)
    kept.add("main", "SELECT 1")
    kept.add("main", "SELECT 1")
    with pytest.raises(LimitExceeded, match="which is the limit"):
        kept.add("main", "SELECT 2")
    with pytest.raises(InvalidRequest, match="characters"):
        kept.add("main", "SELECT 1" + " " * MAX_TEXT)
    kept.close()


def test_prepared_queries_of_lower_roles_are_limited_for_each_database(tmp_path: Path) -> None:
    kept = opened(tmp_path, most=8)
    for number in range(2):
        kept.add("main", f"SELECT {number}", role=VIEWER)
    with pytest.raises(LimitExceeded, match="for this role"):
        kept.add("main", "SELECT 9", role=EDITOR)
    for db in ("a", "b"):
        for number in range(2):
            kept.add(db, f"SELECT {number}", role=VIEWER)
    with pytest.raises(LimitExceeded):
        kept.add("c", "SELECT 9", role=VIEWER)
    kept.add("main", "SELECT 9", role=OWNER)
    kept.drop_database("a")
    kept.close()
    again = opened(tmp_path, most=8)
    again.add("c", "SELECT 9", role=VIEWER)
    with pytest.raises(LimitExceeded):
        again.add("main", "SELECT 10", role=VIEWER)
    again.close()


def test_bytes_of_all_queries_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.queries.prepared.MOST_BYTES", 20_000)
    kept = opened(tmp_path)
    for number in range(4):
        kept.add("main", f"SELECT {number} {'-' * 1000}", role=VIEWER)
    with pytest.raises(LimitExceeded):
        kept.add("main", f"SELECT 5 {'-' * 1000}", role=VIEWER)
    kept.add("main", f"SELECT 5 {'-' * 1000}", role=OWNER)
    kept.close()


@pytest.mark.parametrize("name", ["", " ", "x" * 201, "a\nb", "\x1b[2J"])
def test_name_that_is_no_label_is_refused(tmp_path: Path, name: str) -> None:
    kept = opened(tmp_path)
    with pytest.raises(InvalidRequest, match="name"):
        kept.add("main", "SELECT 1", name=name)
    assert kept.count == 0
    kept.close()


def test_caller_with_a_lower_role_does_not_rename_a_prepared_query(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    kept.add("main", "SELECT 1", name="report", role=OWNER)
    assert kept.add("main", "SELECT 1", name="mine", role=VIEWER).name == "report"
    kept.close()


def test_opening_a_queries_file_that_is_not_a_database_raises_log_damaged(tmp_path: Path) -> None:
    (tmp_path / "queries.db").write_bytes(b"not a database at all, but long enough to be read as one" * 20)
    with pytest.raises(LogDamaged):
        opened(tmp_path)


@pytest.mark.parametrize("text", ["SELECT '\0'", "SELECT '\ud800'", "SELECT 1" + " " * MAX_TEXT])
def test_query_that_is_not_text_is_rejected(text: str) -> None:
    with pytest.raises(InvalidRequest):
        transient_query(text, None)


def test_query_arguments_are_matched_by_position_or_by_name() -> None:
    assert named_args(["1", "2"], [5, "x"]) == {"1": 5, "2": "x"}
    assert named_args(["a", "b"], {":b": 1, "a": 2}) == {"a": 2, "b": 1}
    assert named_args(["a", "b", "a"], [1, 2]) == {"a": 1, "b": 2}
    for wrong in ([], [1, 2, 3], {"a": 1}, {"a": 1, "b": 2, "c": 3}):
        with pytest.raises(InvalidRequest, match="takes|missing|no parameter"):
            named_args(["a", "b"], wrong)


def test_many_named_arguments_are_matched_in_linear_time() -> None:
    compared = 0

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    names = [Name(f"a{number}") for number in range(500)]
    assert len(named_args(names, dict.fromkeys(map(str, names), 1))) == 500
    assert compared <= 10 * len(names)


def test_instance_key_differs_by_argument_type_and_name_but_not_by_argument_order() -> None:
    keys = [instance_key("q", {"1": value}) for value in (1, 1.0, True, "1", None)]
    assert len(set(keys)) == len(keys)
    assert instance_key("q", {"a": 1, "b": 2}) == instance_key("q", {"b": 2, "a": 1})
    assert instance_key("q", {"a": 1}) != instance_key("q", {"b": 1})


def test_preparing_a_query_on_a_full_disk_fails_and_keeps_the_earlier_queries(tmp_path: Path) -> None:
    path = tmp_path / "queries.db"
    kept = PreparedQueries.open(path, most=1000)
    one = kept.add("main", "SELECT 1")
    with kept._file.connection() as file:
        file.pragma("max_page_count", file.pragma("page_count"))  # as SQLite sees a full disk
    with pytest.raises(HeadwaterError) as refused:
        kept.add("main", f"SELECT '{'x' * 90_000}'")
    assert refused.value.hint and kept.count == 1 and kept.get(one.id) == one
    with kept._file.connection() as file:
        file.pragma("max_page_count", 1_000_000)
    assert kept.add("main", "SELECT 2").sql == "SELECT 2"
    kept.close()
    assert PreparedQueries.open(path, most=1000).count == 2
