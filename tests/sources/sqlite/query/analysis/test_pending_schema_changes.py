"""While a schema change is pending no answer has a tag: rows may have changed without an offset."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.capture.captured_database import foreign
from tests.sources.sqlite.query.shop_analysis import SHOP, dependency_texts, opened, run, settle


def test_head_is_settled_once_capture_matches_the_schema(tmp_path: Path) -> None:
    with opened(tmp_path, SHOP) as source:
        settle(source)
        assert source.read_head().settled
        found = source.analyse("SELECT name FROM c WHERE id = 1")
        read = source.answer(found, {})
        assert read is not None and read.settled


def test_answer_after_foreign_ddl_is_unsettled_until_capture_checked_it(tmp_path: Path) -> None:
    with opened(tmp_path, SHOP) as source:
        settle(source)
        found = source.analyse("SELECT name FROM c WHERE id = 1")
        # The table is made again with the same words: same epoch, and no trigger of ours saw its rows come.
        foreign(
            tmp_path / "app.db",
            "ALTER TABLE c RENAME TO was",
            SHOP[0],
            "INSERT INTO c(id, name) VALUES (1, 'unseen')",
            "DROP TABLE was",
        )
        read = source.answer(found, {})
        assert read is not None and read.rows == (("unseen",),)
        assert not read.settled
        assert not source.read_head().settled
        before = read.offset
        settle(source)
        again = source.answer(source.analyse("SELECT name FROM c WHERE id = 1"), {})
        assert again is not None and again.settled
        assert again.offset > before  # the schema change has an offset of its own


def test_dropped_capture_trigger_leaves_the_source_unsettled(tmp_path: Path) -> None:
    with opened(tmp_path, SHOP) as source:
        settle(source)
        (name,) = next(
            iter(source.read("SELECT name FROM sqlite_schema WHERE type = 'trigger' AND tbl_name = 'o'").rows)
        )
        foreign(tmp_path / "app.db", f'DROP TRIGGER "{name}"')
        assert not source.read_head().settled
        settle(source)
        assert source.read_head().settled


def test_own_schema_change_is_settled_by_following(tmp_path: Path) -> None:
    with opened(tmp_path, SHOP) as source:
        settle(source)
        run(source, "CREATE TABLE later(id INTEGER PRIMARY KEY)")
        settle(source)
        assert source.read_head().settled


def test_schema_changed_during_a_check_is_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, SHOP) as source:
        settle(source)
        follower = source._follower
        real, moved = follower._reconcile, []

        def reconcile(after: int) -> int:
            fits = real(after)
            if not moved:
                moved.append(True)
                foreign(tmp_path / "app.db", "CREATE VIEW second AS SELECT 2")
            return fits

        monkeypatch.setattr(follower, "_reconcile", reconcile)
        foreign(tmp_path / "app.db", "CREATE VIEW first AS SELECT 1")
        settle(source)
        assert moved and source.read_head().settled


def test_analysis_is_outdated_when_its_view_is_replaced(tmp_path: Path) -> None:
    with opened(tmp_path, SHOP) as source:
        found = source.analyse("SELECT id FROM big")
        run(source, "DROP VIEW big")
        run(source, "CREATE VIEW big AS SELECT id, cid, total FROM o WHERE total > 999")
        assert source.answer(found, {}) is None
        again = source.analyse("SELECT id FROM big")
        assert again.epoch != found.epoch
        assert dependency_texts(again) == ["o: columns id, total; rows where total > 999"]
