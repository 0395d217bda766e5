"""The size limit of the undo file of a snapshot."""

import pytest

from headwater.errors import LimitExceeded
from headwater.model.change import Change, Op
from headwater.model.table import Column, Table
from headwater.ranges.pull import undo


def test_changes_past_the_most_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undo, "MAX_BYTES", 1 << 20)
    table = Table("t", (Column("k", "i64"), Column("v", "str")), ("k",))
    kept = undo.Undo(table, lambda key: str(key[0]).encode())
    kept.add_all(Change(Op.INSERT, table, None, (k, "x" * 10_000)) for k in range(50))
    with pytest.raises(LimitExceeded, match="more than 1 MiB"):
        kept.add_all(Change(Op.INSERT, table, None, (k, "x" * 10_000)) for k in range(50, 200))
    kept.close()
