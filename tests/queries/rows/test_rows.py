"""The data API on a real SQLite file: get, insert, update, delete, tags, all or nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.queries.open_databases import Files, dump
from tests.suite.deadlines import PATIENCE

from headwater.errors import Conflict, DuplicateKey, InvalidRequest, NotFound
from headwater.model.literal import U64, DateTime, Json, Value
from headwater.model.predicate import Expr, eq, parse_expr
from headwater.model.principal import ANONYMOUS
from headwater.queries.etag.row_etag import row_etag
from headwater.queries.rows.rows import FoundRow, Rows, StoredResult, TableAddress
from headwater.queries.statements.pending_answer import PendingAnswer
from headwater.queries.statements.transactions import Transactions

USERS = TableAddress("users")
ALL = parse_expr({"lit": {"t": "bool", "v": True}})
DDL = """CREATE TABLE users (
    id INTEGER PRIMARY KEY, email TEXT NOT NULL UNIQUE, age INTEGER, born DATETIME,
    extra JSON, shout TEXT GENERATED ALWAYS AS (upper(email)))"""


@pytest.fixture
def files(tmp_path: Path) -> Any:
    with Files(tmp_path) as found:
        found.run(DDL)
        found.run("CREATE TABLE pairs (a TEXT, b INTEGER, v BLOB, PRIMARY KEY (a, b)) WITHOUT ROWID")
        found.run("CREATE TABLE lines (line TEXT)")
        yield found


@pytest.fixture
def rows(files: Files) -> Rows:
    return Rows(files, Transactions(files))


def get(rows: Rows, key: list[Value], place: TableAddress = USERS) -> FoundRow:
    found = rows.get(ANONYMOUS, place, key)
    return found.result(PATIENCE) if isinstance(found, PendingAnswer) else found


def insert(rows: Rows, *values: dict[str, Value], place: TableAddress = USERS, **more: Any) -> StoredResult:
    return rows.insert(ANONYMOUS, place, values, **more).result(PATIENCE)


def update(rows: Rows, where: Expr, place: TableAddress = USERS, **more: Any) -> StoredResult:
    return rows.update(ANONYMOUS, place, where, more.pop("values"), **more).result(PATIENCE)


def delete(rows: Rows, where: Expr, place: TableAddress = USERS, **more: Any) -> StoredResult:
    return rows.delete(ANONYMOUS, place, where, **more).result(PATIENCE)


def test_inserted_row_is_read_back_with_its_types(rows: Rows) -> None:
    given = {"email": "a@x", "age": U64(3), "born": DateTime("2026-01-01T00:00:00Z"), "extra": Json('{"k":1}')}
    stored = insert(rows, given, returning=["id", "shout"])
    assert (stored.affected, stored.last_insert_id) == (1, 1)
    assert (stored.columns, stored.returning) == (("id", "shout"), ((1, "A@X"),))
    found = get(rows, [1])
    seen = dict(zip(found.table.names, found.row, strict=True))
    assert seen == {
        "id": 1,
        "email": "a@x",
        "age": 3,
        "born": DateTime("2026-01-01T00:00:00Z"),
        "extra": Json('{"k":1}'),
        "shout": "A@X",
    }
    assert found.etag == row_etag("main", found.table, found.row)


def test_missing_row_and_missing_table_are_not_found(rows: Rows) -> None:
    with pytest.raises(NotFound):
        get(rows, [1])
    with pytest.raises(NotFound) as found:
        get(rows, [1], TableAddress("user"))
    assert found.value.hint == "Did you mean 'users'?"
    with pytest.raises(NotFound):
        get(rows, [1], TableAddress("users", "nowhere"))
    for write in (
        lambda: insert(rows, {"a": 1}, place=TableAddress("nope")),
        lambda: update(rows, ALL, TableAddress("nope"), values={"a": 1}),
        lambda: delete(rows, ALL, TableAddress("nope")),
    ):
        with pytest.raises(NotFound):
            write()


def test_database_named_default_is_main(rows: Rows) -> None:
    insert(rows, {"email": "a"}, place=TableAddress("users", "default"))
    one, other = get(rows, [1], TableAddress("users", "default")), get(rows, [1], TableAddress("users", "main"))
    assert one == other


@pytest.mark.parametrize("key", [[], [1, 2], ["1"], [None, None], [1.5]])
def test_get_with_a_key_of_the_wrong_width_or_kind_is_rejected(rows: Rows, key: list[Value]) -> None:
    with pytest.raises(InvalidRequest):
        get(rows, key)


def test_get_by_composite_key_returns_its_row_and_rejects_a_partial_key(rows: Rows) -> None:
    place = TableAddress("pairs")
    insert(rows, {"a": "x", "b": 1, "v": b"1"}, {"a": "x", "b": 2, "v": b"2"}, place=place)
    assert get(rows, ["x", 2], place).row == ("x", 2, b"2")
    with pytest.raises(InvalidRequest):
        get(rows, ["x"], place)


def test_get_by_key_on_a_table_without_a_primary_key_is_rejected(rows: Rows) -> None:
    insert(rows, {"line": "x"}, place=TableAddress("lines"))
    with pytest.raises(InvalidRequest, match="no primary key"):
        get(rows, [1], TableAddress("lines"))
    assert delete(rows, eq("line", "x"), TableAddress("lines")).affected == 1


def test_insert_whose_third_row_fails_writes_no_row_and_logs_no_change(files: Files, rows: Rows) -> None:
    insert(rows, {"email": "taken"})
    before, head = dump(files.path("main")), files.get("main").head()
    for bad, error in (
        ({"email": "taken"}, DuplicateKey),
        ({"email": None}, InvalidRequest),
        ({}, InvalidRequest),
        ({"email": 5}, InvalidRequest),
        ({"email": "d", "emial": "x"}, InvalidRequest),
        ({"email": "d", "shout": "x"}, InvalidRequest),
        ({"id": 1, "email": "d"}, DuplicateKey),
    ):
        with pytest.raises(error) as found:
            insert(rows, {"email": "b"}, {"email": "c"}, bad)
        assert found.type is error
    assert dump(files.path("main")) == before
    assert files.get("main").head() == head
    assert [change for part in files.get("main").follow(after=head) for change in part.changes] == []


def test_update_that_fails_on_its_second_row_changes_no_row(files: Files, rows: Rows) -> None:
    insert(rows, {"email": "a"}, {"email": "b"})
    before, head = dump(files.path("main")), files.get("main").head()
    with pytest.raises(DuplicateKey):
        update(rows, ALL, values={"email": "c"})
    assert (dump(files.path("main")), files.get("main").head()) == (before, head)


def test_every_write_returns_its_causality_token(files: Files, rows: Rows) -> None:
    stored = insert(rows, {"email": "a"}, {"email": "b"})
    head = files.get("main").head()
    assert stored.causality is not None
    assert json.loads(json.dumps([(dep.table, dep.v) for dep in stored.causality.deps])) == [["main.users", head]]
    nothing = delete(rows, eq("id", 99))
    assert nothing.affected == 0
    assert nothing.causality is not None and nothing.causality.deps == ()


def test_update_or_delete_with_a_limit_affects_the_first_rows_in_key_order(rows: Rows) -> None:
    insert(rows, *({"email": str(place)} for place in range(5)))
    assert update(rows, ALL, values={"age": 1}, limit=2).affected == 2
    assert [get(rows, [place]).row[2] for place in (1, 2, 3)] == [1, 1, None]
    assert delete(rows, ALL, limit=0).affected == 0
    assert delete(rows, ALL, limit=3).affected == 3
    assert get(rows, [4]).row[1] == "3"


@pytest.mark.parametrize("form", ["{}", 'W/"{}"', '"{}"'])
def test_write_with_a_current_tag_succeeds_once(rows: Rows, form: str) -> None:
    insert(rows, {"email": "a"})
    tag = form.format((get(rows, [1]).etag or "").strip('"'))
    done = update(rows, eq("id", 1), values={"age": 5}, if_match=tag)
    assert done.affected == 1
    assert done.etag == get(rows, [1]).etag
    with pytest.raises(Conflict):
        update(rows, eq("id", 1), values={"age": 6}, if_match=tag)
    with pytest.raises(Conflict):
        delete(rows, eq("id", 1), if_match=tag)
    assert get(rows, [1]).row[2] == 5
    assert delete(rows, eq("id", 1), if_match=done.etag).affected == 1


def test_update_of_a_row_key_returns_the_etag_of_the_row_under_its_new_key(rows: Rows) -> None:
    insert(rows, {"email": "a"})
    done = update(rows, eq("id", 1), values={"id": 7}, if_match=get(rows, [1]).etag)
    assert done.etag == get(rows, [7]).etag


def test_if_match_on_a_write_matching_no_row_or_several_raises_conflict(files: Files, rows: Rows) -> None:
    insert(rows, {"email": "a"}, {"email": "b"})
    tag = get(rows, [1]).etag
    head = files.get("main").head()
    for where in (ALL, eq("id", 99)):
        with pytest.raises(Conflict):
            update(rows, where, values={"age": 1}, if_match=tag)
        with pytest.raises(Conflict):
            delete(rows, where, if_match=tag)
    assert files.get("main").head() == head


@pytest.mark.parametrize(
    "values",
    [{}, {"nope": 1}, {"age": "1"}, {"age": 1.5}, {"email": None}, {"shout": "x"}, {"age": U64(2**63)}],
)
def test_values_that_are_invalid_for_their_columns_are_refused_and_change_nothing(
    files: Files, rows: Rows, values: dict[str, Value]
) -> None:
    insert(rows, {"email": "a"})
    head = files.get("main").head()
    with pytest.raises(InvalidRequest):
        update(rows, ALL, values=values)
    with pytest.raises(InvalidRequest):
        insert(rows, values)
    assert files.get("main").head() == head


def test_insert_without_rows_or_with_unknown_returning_columns_is_refused(files: Files, rows: Rows) -> None:
    head = files.get("main").head()
    with pytest.raises(InvalidRequest):
        insert(rows)
    with pytest.raises(InvalidRequest):
        insert(rows, {"email": "a"}, returning=["nope"])
    assert files.get("main").head() == head


@pytest.mark.parametrize(
    "where",
    [{"col": "nope"}, {"col": "id", "table": "other"}, {"op": "eq", "a": {"col": "x"}, "b": {"lit": 1}}],
)
def test_condition_on_a_missing_column_is_rejected(rows: Rows, where: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        delete(rows, parse_expr(where))


def test_hostile_table_and_column_names_are_never_run_as_sql(files: Files, rows: Rows) -> None:
    name = 'a"; DROP TABLE users; --'
    column = "select ' \" ünïcode"
    files.run(
        f'CREATE TABLE "{name.replace(chr(34), chr(34) * 2)}" (k INTEGER PRIMARY KEY, '
        f'"{column.replace(chr(34), chr(34) * 2)}" TEXT)'
    )
    place = TableAddress(name)
    insert(rows, {"k": 1, column: "'; DELETE FROM users; --"}, place=place)
    assert get(rows, [1], place).row == (1, "'; DELETE FROM users; --")
    assert update(rows, eq(column, "'; DELETE FROM users; --"), place, values={column: "x"}).affected == 1
    assert delete(rows, eq(column, "x"), place).affected == 1
    insert(rows, {"email": "still there"})
    for hostile in ('users"; --', "users; DROP TABLE users", "users\0", "", "main.users", "_headwater"):
        with pytest.raises((NotFound, InvalidRequest)):
            insert(rows, {"email": "x"}, place=TableAddress(hostile))
