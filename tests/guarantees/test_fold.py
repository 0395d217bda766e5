"""The fold itself must be able to fail."""

import pytest
from tests.guarantees.fold import Fold, raw

from headwater.model.change import Change, Op
from headwater.model.table import Column, Table

T = Table("t", (Column("id"), Column("x")), ("id",))
NOCASE = Table("n", (Column("id", collation="NOCASE"),), ("id",))


def started(*rows: tuple) -> Fold:
    fold = Fold()
    fold.load(T, rows)
    return fold


def test_valid_history_folds_to_the_rows() -> None:
    fold = started((1, "a"))
    fold.apply_all(
        [
            Change(Op.INSERT, T, None, (2, b"b")),
            Change(Op.UPDATE, T, (1, "a"), (3, 1.0)),
            Change(Op.DELETE, T, (2, b"b"), None),
        ]
    )
    assert fold.rows() == {"t": [(raw(3), raw(1.0))]}
    fold.check("t", [(raw(3), raw(1.0))])


@pytest.mark.parametrize(
    "change",
    [
        Change(Op.INSERT, T, None, (1, "new")),
        Change(Op.INSERT, T, None, (1.0, "new")),
        Change(Op.UPDATE, T, (1, "b"), (1, "c")),
        Change(Op.UPDATE, T, (2, "a"), (1, "c")),
        Change(Op.DELETE, T, (1, b"a"), None),
        Change(Op.DELETE, T, None, (1, "a")),
        Change(Op.INSERT, Table("other", T.columns, T.key), None, (1, "a")),
        Change(Op.INSERT, Table("t", T.columns[:1], T.key), None, (9,)),
    ],
)
def test_fold_refuses_a_change_that_contradicts_its_rows(change: Change) -> None:
    with pytest.raises(AssertionError):
        started((1, "a")).apply(change)


def test_fold_refuses_a_value_of_another_type() -> None:
    for mine, theirs in [(1, 1.0), (0.0, -0.0), ("a", b"a"), ("\udcff", "?"), (None, 0), ("a\0b", "a")]:
        with pytest.raises(AssertionError):
            started((1, mine)).check("t", [(raw(1), raw(theirs))])


def test_fold_compares_keys_by_the_collation() -> None:
    fold = Fold()
    fold.load(NOCASE, [("a",)])
    with pytest.raises(AssertionError, match="is taken"):
        fold.apply(Change(Op.INSERT, NOCASE, None, ("A",)))
    fold.apply(Change(Op.UPDATE, NOCASE, ("a",), ("A",)))


def test_resnapshot_makes_the_table_unknown_until_its_rows_are_loaded() -> None:
    fold = started((1, "a"))
    fold.apply(Change(Op.SCHEMA_CHANGE, T, resnapshot=True))
    assert fold.unknown == {"t"} and fold.rows() == {}
    fold.apply(Change(Op.DELETE, T, (7, 7), None))
    fold.load(T, [(7, 7)])
    fold.apply(Change(Op.DELETE, T, (7, 7), None))
    assert fold.rows() == {"t": []}


def test_fold_expects_null_in_added_columns_and_keeps_renamed_values() -> None:
    fold = started((1, "a"))
    wider = Table("t", (*T.columns, Column("y")), ("id",), version=2)
    fold.apply(Change(Op.SCHEMA_CHANGE, wider, ddl="ALTER TABLE t ADD COLUMN y"))
    fold.apply(Change(Op.UPDATE, wider, (1, "a", None), (1, "a", 6)))
    renamed = Table("t", (wider.columns[0], Column("z"), wider.columns[2]), ("id",), version=3)
    fold.apply(Change(Op.SCHEMA_CHANGE, renamed, ddl="ALTER TABLE t RENAME COLUMN x TO z"))
    fold.check("t", [(raw(1), raw("a"), raw(6))])
    fold.apply(Change(Op.SCHEMA_CHANGE, renamed, ddl='drop table "t"'))
    assert fold.tables == {}
