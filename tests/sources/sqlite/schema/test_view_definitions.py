"""Redefined views are reported to the readers of their tables; new views are not."""

from __future__ import annotations

from pathlib import Path

from tests.capture.captured_database import Running, foreign, running

from headwater.model.change import Op
from headwater.sources.sqlite.schema.view_definitions import moved, read_by, remembered


def test_dropped_restored_and_redefined_views_are_reported_as_moved() -> None:
    before = {"same": "x", "other": "x", "gone": "x", "back": None, "still gone": None}
    now = {"same": "x", "other": "y", "back": "x", "new": "x"}
    assert moved(before, now) == ["other", "gone", "back"]
    assert remembered(before, now) == {**now, "gone": None, "still gone": None}
    assert moved(remembered(before, now), now) == []


def test_tables_of_a_view_include_those_of_nested_views() -> None:
    texts = {
        "a": "CREATE VIEW a AS SELECT * FROM b JOIN Orders",
        "b": 'CREATE VIEW b AS SELECT * FROM "odd""name", a',  # in a circle: SQLite finds that out only when asked
        "c": None,
    }
    assert read_by("a", texts, ["orders", 'odd"name', "elsewhere"]) == {"orders", 'odd"name'}
    assert read_by("c", texts, ["orders"]) == set()


def schema_change_texts(one: Running) -> list[str]:
    """Wait for capture; return table and statement of each schema change."""
    one.caught_up()
    return [f"{c.table.name}: {c.ddl}" for c in one.changes() if c.op is Op.SCHEMA_CHANGE]


def test_view_redefined_by_any_program_is_reported_for_its_tables(tmp_path: Path) -> None:
    with running(tmp_path) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY)")
        one.run("CREATE TABLE u(id INTEGER PRIMARY KEY)")
        one.run("CREATE VIEW v AS SELECT id FROM t")
        one.run("CREATE VIEW w AS SELECT id FROM v")
        before = schema_change_texts(one)
        one.run("DROP VIEW v")
        assert schema_change_texts(one)[len(before) :] == ["t: DROP VIEW v"]
        one.run("CREATE VIEW v AS SELECT id FROM u")
        assert schema_change_texts(one)[len(before) + 1 :] == ["u: CREATE VIEW v AS SELECT id FROM u"]
        seen = len(schema_change_texts(one))
        foreign(Path(one.source.path), "BEGIN", "DROP VIEW w", "CREATE VIEW w AS SELECT id + 1 FROM v", "COMMIT")
        assert schema_change_texts(one)[seen:] == ["u: CREATE VIEW w AS SELECT id + 1 FROM v"]
        one.run("ALTER TABLE t ADD COLUMN x")
        assert schema_change_texts(one)[seen + 1 :] == ["t: ALTER TABLE t ADD COLUMN x"]
