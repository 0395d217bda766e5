"""Messages of a real server, decoded: images, identities, names, schema changes, subtransactions, streams."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.sources.postgres.pg_server import Facts, Stream, feed, tokens

from headwater.model.change import Change, Op, Transaction
from headwater.model.literal import UNAVAILABLE
from headwater.sources.postgres.capture.decode.pgoutput import Relation, StreamStart, decode
from headwater.sources.postgres.capture.decode.replication_frames import lsn_of
from headwater.sources.postgres.capture.stream.transaction_assembly import Item, LogEnd
from headwater.sources.postgres.schema.relations import Relations, split_name
from headwater.sources.postgres.schema.shape_changes import Shapes

Start = Callable[..., Stream]
U = UNAVAILABLE
LARGE = "(SELECT string_agg(md5(n::text), '') FROM generate_series(1, 200) n)"  # too large to be kept in the row


def changes(items: list[Item]) -> list[Change]:
    return [change for item in items if isinstance(item, Transaction) for change in item.changes]


def rows(items: list[Item]) -> list[Change]:
    return [change for change in changes(items) if change.op is not Op.SCHEMA_CHANGE]


def images(items: list[Item]) -> list[tuple[str, Any, Any]]:
    return [(change.op.word, change.before, change.after) for change in rows(items)]


def test_each_operation_has_the_images_of_the_default_identity(stream: Start) -> None:
    one = stream("CREATE TABLE t (id int PRIMARY KEY, a text, b numeric)")
    one.run(
        "INSERT INTO t VALUES (1, 'one', 1.50), (2, NULL, NULL)",
        "UPDATE t SET a = 'eins' WHERE id = 1",
        "UPDATE t SET id = 3 WHERE id = 2",
        "DELETE FROM t WHERE id = 1",
        "TRUNCATE t",
    )
    items = one.items()
    found = [(op, before, after and after[:2]) for op, before, after in images(items)]
    assert found == [
        ("insert", None, (1, "one")),
        ("insert", None, (2, None)),
        ("update", (1, U, U), (1, "eins")),
        ("update", (2, U, U), (3, None)),
        ("delete", (1, U, U), None),
        ("truncate", None, None),
    ]
    first = changes(items)[0]
    assert (first.op, first.table.name, first.table.key, first.resnapshot) == (Op.SCHEMA_CHANGE, "t", ("id",), False)
    assert [(c.kind, c.declared, c.nullable) for c in first.table.columns] == [
        ("i64", "integer", False),
        ("str", "text", True),
        ("dec", "numeric", True),
    ]


def test_replica_identity_full_delivers_both_images_with_large_values(stream: Start) -> None:
    one = stream("CREATE TABLE t (id int PRIMARY KEY, n int, big text)", "ALTER TABLE t ALTER big SET STORAGE EXTERNAL")
    one.run(f"INSERT INTO t VALUES (1, 1, {LARGE})", "UPDATE t SET n = 2")
    ((_, _, inserted), (_, before, after)) = images(one.items())
    assert len(inserted[2]) == 6400
    assert (before, after) == ((1, U, U), (1, 2, U))
    one.run("ALTER TABLE t REPLICA IDENTITY FULL", "UPDATE t SET n = 3", "DELETE FROM t")
    ((_, before, after), (_, gone, _)) = images(one.items())
    assert before == (1, 2, inserted[2])
    assert after == gone == (1, 3, inserted[2])


def test_identity_index_is_reported_as_the_key(stream: Start) -> None:
    one = stream(
        "CREATE TABLE t (id int PRIMARY KEY, code text NOT NULL, area int NOT NULL, UNIQUE (area, code))",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX t_area_code_key",
        "INSERT INTO t VALUES (1, 'a', 7)",
        "UPDATE t SET id = 2",
        "UPDATE t SET code = 'b'",
    )
    items = one.items()
    assert changes(items)[0].table.key == ("code", "area")
    assert images(items)[1:] == [
        ("update", (U, "a", 7), (2, "a", 7)),
        ("update", (U, "a", 7), (2, "b", 7)),
    ]


def test_composite_key_keeps_the_order_of_its_index(stream: Start) -> None:
    one = stream("CREATE TABLE t (a int, b int, PRIMARY KEY (b, a))", "INSERT INTO t VALUES (1, 2)")
    assert rows(one.items())[0].key == (2, 1)


def test_table_without_key_is_delivered_with_an_empty_key(stream: Start) -> None:
    one = stream("CREATE TABLE t (a int)", "ALTER TABLE t REPLICA IDENTITY FULL", "INSERT INTO t VALUES (1)")
    one.run("UPDATE t SET a = 2", "DELETE FROM t")
    items = one.items()
    assert changes(items)[0].table.key == ()
    assert images(items)[1:] == [("update", (1,), (2,)), ("delete", (2,), None)]


HOSTILE = ["a.b", 'qu"ote', '"', ".", "Odd Name", "naïve ☃", "new\nline", "drop', --", "a..b", "x" * 63, "%s", "{0}"]


def test_hostile_schema_and_table_names_remain_distinct(stream: Start) -> None:
    one = stream("CREATE SCHEMA a", "CREATE TABLE a.b (id int PRIMARY KEY)", "INSERT INTO a.b VALUES (0)")
    names = {"a.b": ("a", "b")}
    for number, name in enumerate(HOSTILE):
        quoted = '"' + name.replace('"', '""') + '"'
        one.run(f"CREATE SCHEMA IF NOT EXISTS {quoted}")
        for schema in ("public", quoted):
            one.run(
                f'CREATE TABLE {schema}.{quoted} (id int PRIMARY KEY, {quoted} text, "_{number}" int)',
                f"INSERT INTO {schema}.{quoted} VALUES ({number}, 'x', 1)",
            )
    found = rows(one.items())
    assert [(change.key, change.after and change.after[1:]) for change in found[1:]] == [
        ((number,), ("x", 1)) for number in range(len(HOSTILE)) for _ in range(2)
    ]
    names = {change.table.name for change in found}
    assert len(names) == len(found)
    pairs = [("a", "b"), *((schema, name) for name in HOSTILE for schema in ("public", name))]
    assert [split_name(change.table.name) for change in found] == pairs
    assert [change.table.names[1] for change in found[1:]] == [name for name in HOSTILE for _ in range(2)]


def test_schema_change_reports_whether_rows_may_have_changed(stream: Start) -> None:
    one = stream("CREATE TABLE t (id int PRIMARY KEY, a int)", "INSERT INTO t VALUES (1, 1)")
    assembly = one.assembly()
    one.items(assembly)
    cases = {
        "ADD b text": False,
        "ADD c int DEFAULT 5": True,
        "ALTER a TYPE bigint": True,
        "DROP b": False,
        "RENAME a TO aa": True,
        "ALTER aa SET NOT NULL": None,  # the stream does not say so: see test_pg_capture_damage
        "REPLICA IDENTITY FULL": None,
    }
    version = 1
    for sql, resnapshot in cases.items():
        one.run(
            f"ALTER TABLE t {sql}",
            "DELETE FROM t WHERE id = 2",
            "INSERT INTO t (id, " + ("aa" if "aa" in sql or "IDENTITY" in sql else "a") + ") VALUES (2, 2)",
        )
        told = [change for change in changes(one.items(assembly)) if change.op is Op.SCHEMA_CHANGE]
        assert [change.resnapshot for change in told] == ([] if resnapshot is None else [resnapshot]), sql
        version += len(told)
        assert all(change.table.version == version and change.ddl.startswith("ALTER TABLE t ") for change in told)


def test_renamed_table_ends_and_begins_under_its_new_name(stream: Start) -> None:
    one = stream("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    assembly = one.assembly()
    one.items(assembly)
    one.run("ALTER TABLE t RENAME TO u", "INSERT INTO u VALUES (2)")
    gone, came, row = changes(one.items(assembly))
    assert (gone.table.name, gone.ddl) == ("t", "ALTER TABLE t RENAME TO u")
    assert (came.table.name, came.resnapshot, row.table is came.table) == ("u", True, True)
    one.run("CREATE TABLE t (other text PRIMARY KEY)", "INSERT INTO t VALUES ('x')")
    assert changes(one.items(assembly))[0].table.version == 2  # the first version of the name was another table


def test_recreated_or_swapped_table_is_reported_as_a_new_table(stream: Start) -> None:
    one = stream("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    relations = Relations(Shapes(), Facts(one))
    assembly = one.assembly(relations)
    one.items(assembly)
    one.run("DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (2)")
    gone, came, row = changes(one.items(assembly))
    assert (gone.table.name, gone.ddl, came.table.version, came.resnapshot) == ("t", "DROP TABLE t", 2, True)
    one.run("CREATE TABLE u (id int PRIMARY KEY)", "INSERT INTO u VALUES (7)")
    one.run("BEGIN; ALTER TABLE t RENAME TO v; ALTER TABLE u RENAME TO t; COMMIT")
    again = one.assembly(Relations(Shapes(relations.tables, relations.oids), Facts(one)))
    one.reopen()
    one.items(again)
    one.run("INSERT INTO t VALUES (8)", "INSERT INTO v VALUES (3)")
    found = [(change.op.word, change.table.name, change.ddl or change.key) for change in changes(one.items(again))]
    assert found == [
        ("schema_change", "u", "ALTER TABLE u RENAME TO t"),
        ("schema_change", "t", "DROP TABLE t"),
        ("schema_change", "t", 'CREATE TABLE t ("id" integer NOT NULL, PRIMARY KEY ("id"))'),
        ("insert", "t", (8,)),
        ("schema_change", "v", 'CREATE TABLE v ("id" integer NOT NULL, PRIMARY KEY ("id"))'),
        ("insert", "v", (3,)),
    ]


def test_known_shapes_are_not_reported_again(stream: Start) -> None:
    one = stream("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    shape = changes(one.items())[0].table
    one.run("INSERT INTO t VALUES (2)")
    one.reopen()
    again = changes(one.items(one.assembly(Relations(Shapes({"t": shape}), Facts(one)))))
    assert [change.op for change in again] == [Op.INSERT, Op.INSERT]
    assert all(change.table is shape for change in again)


def test_partition_keeps_its_name_and_truncate_is_reported_for_each_table(stream: Start) -> None:
    one = stream(
        "CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE q (id int PRIMARY KEY REFERENCES p)",
        "INSERT INTO p VALUES (1)",
        "TRUNCATE p CASCADE",
    )
    found = [(change.op.word, change.table.name) for change in rows(one.items())]
    assert found[0] == ("insert", "p1")
    assert sorted(found[1:]) == [("truncate", "p1"), ("truncate", "q")]


def test_stored_generated_columns_are_captured_from_version_18_on(stream: Start) -> None:
    one = stream("CREATE TABLE t (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED, n serial)")
    one.run("INSERT INTO t VALUES (4)")
    told, inserted = changes(one.items())
    seen = [(column.name, column.generated, column.auto) for column in told.table.columns]
    assert seen == [
        ("id", False, False),
        *[("twice", True, False)] * (one.version_number >= 180000),
        ("n", False, True),
    ]
    assert inserted.after == ((4, 8, 1) if one.version_number >= 180000 else (4, 1))


def test_transactions_are_delivered_in_parts_in_commit_order(stream: Start) -> None:
    one = stream("CREATE TABLE t (id int PRIMARY KEY)", streaming="off", version=1)
    one.run("INSERT INTO t SELECT generate_series(1, 1300)", "INSERT INTO t VALUES (0)")
    parts = [item for item in one.items() if isinstance(item, Transaction)]
    assert [(len(part.changes), part.start, part.last) for part in parts] == [
        (512, 0, False),
        (512, 512, False),
        (277, 1024, True),
        (1, 0, True),
    ]
    assert len({part.id for part in parts}) == 2
    assert abs(parts[0].commit_ts_ms / 1000 - _now(one)) < 300
    assert any(part.commit_us_rest for part in parts), "PostgreSQL tells microseconds"
    positions = [lsn_of(part.position) for part in parts]
    assert positions[0] == positions[1] < positions[2] < positions[3]


def _now(one: Stream) -> float:
    row = one.db.execute("SELECT extract(epoch FROM now())::float8").fetchone()
    assert row is not None
    return float(row[0])


STREAMED = [(2, "on"), (4, "parallel")]


def _streamed(start: Start, version: int, streaming: str) -> Stream:
    one = start("CREATE TABLE t (id int PRIMARY KEY, v text)")
    if version > 2:
        if one.version_number < 160000:
            pytest.skip("protocol version 4 came with PostgreSQL 16")
        one = start("CREATE TABLE t (id int PRIMARY KEY, v text)", version=version, streaming=streaming)
    return one


def _fill(first: int, last: int) -> str:
    return f"INSERT INTO t SELECT n, repeat('x', 100) FROM generate_series({first}, {last}) n"


@pytest.mark.parametrize(("version", "streaming"), STREAMED)
def test_streamed_transaction_omits_rolled_back_savepoints(stream: Start, version: int, streaming: str) -> None:
    one = _streamed(stream, version, streaming)
    with one.server.connect(one.name) as other:
        other.autocommit = False
        other.execute(_fill(1, 2000))
        other.execute("SAVEPOINT a")
        other.execute(_fill(5001, 7000))
        one.run("INSERT INTO t VALUES (-1, 'meanwhile')")
        other.execute("ROLLBACK TO a")
        other.execute(_fill(2001, 3000))
        other.execute("SAVEPOINT b")
        other.execute("ALTER TABLE t ADD w int")
        other.execute("INSERT INTO t SELECT n, 'y', 1 FROM generate_series(8001, 10000) n")
        other.execute("ROLLBACK TO b")
        other.execute("SAVEPOINT c")
        other.execute(_fill(3001, 5000))
        other.execute("RELEASE c")
        other.execute("SELECT pg_logical_emit_message(true, 'headwater', 'inside')")
        other.execute("DELETE FROM t WHERE id = 1")
        other.commit()
    one.run("INSERT INTO t VALUES (-2, 'later')")
    messages = one.messages()
    assert any(message[:1] == b"S" for message in messages), "nothing was streamed"
    assert any(message[:1] == b"A" for message in messages), "nothing was taken back"
    items = feed(one.assembly(), messages)
    found = [(change.op.word, (change.key or ("",))[0]) for change in rows(items)]
    wanted = [("insert", n) for n in [-1, *range(1, 5001)]] + [("delete", 1), ("insert", -2)]
    assert found == wanted
    parts = [item for item in items if isinstance(item, Transaction)]
    assert [part.start for part in parts[1:-1]] == list(range(0, 5001, 512))
    assert [part.last for part in parts] == [True, *[False] * (len(parts) - 3), True, True]
    assert max(len(part.changes) for part in parts) == 512
    assert tokens(items) == ["inside"]
    assert items.index(next(item for item in items if not isinstance(item, Transaction))) == len(items) - 2
    assert len([c for c in changes(items) if c.op is Op.SCHEMA_CHANGE]) == 1


@pytest.mark.parametrize(("version", "streaming"), STREAMED)
def test_rolled_back_streamed_transaction_is_not_delivered(stream: Start, version: int, streaming: str) -> None:
    one = _streamed(stream, version, streaming)
    with one.server.connect(one.name) as other:
        other.autocommit = False
        other.execute(_fill(1, 3000))
        other.rollback()
    one.run("INSERT INTO t VALUES (1, 'x')")
    messages = one.messages()
    assembly = one.assembly()
    items = feed(assembly, messages)
    assert [change.key for change in rows(items)] == [(1,)]
    assert assembly.is_idle


def test_interleaved_streamed_transactions_are_delivered_in_commit_order(stream: Start) -> None:
    one = stream("CREATE TABLE t (id int PRIMARY KEY, v text)")
    with one.server.connect(one.name) as left, one.server.connect(one.name) as right:
        left.autocommit = right.autocommit = False
        for block in range(5):
            left.execute(_fill(block * 1000, block * 1000 + 999))
            right.execute(_fill(100_000 + block * 1000, 100_000 + block * 1000 + 999))
        right.commit()
        left.execute("TRUNCATE t")
        left.execute(_fill(1, 10))
        left.commit()
    messages = one.messages()
    starts = {m.xid for m in map(decode, [m for m in messages if m[:1] == b"S"]) if isinstance(m, StreamStart)}
    assert len(starts) == 2
    found = [(change.key or (None,))[0] for change in rows(feed(one.assembly(), messages))]
    assert found == [*range(100_000, 105_000), *range(5000), None, *range(1, 11)]


def test_shape_changed_in_a_streamed_transaction_is_reported_before_its_rows(stream: Start) -> None:
    one = stream("CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (0, '')")
    with one.server.connect(one.name) as other:
        other.autocommit = False
        other.execute(_fill(1, 1500))
        other.execute("ALTER TABLE t ADD w int")
        other.execute("INSERT INTO t SELECT n, '', n FROM generate_series(2001, 4000) n")
        other.commit()
    one.run("INSERT INTO t VALUES (5000, '', 1)")
    messages = one.messages()
    assert any(message[:1] == b"S" for message in messages)
    found = changes(feed(one.assembly(), messages))
    told = [place for place, change in enumerate(found) if change.op is Op.SCHEMA_CHANGE]
    assert told == [0, 1502]
    assert {len(change.after or ()) for change in found[1503:]} == {3}
    assert {change.table.version for change in found[1502:]} == {2}


def test_prepared_transactions_are_delivered_at_their_commit(stream: Start) -> None:
    one = stream("CREATE TABLE t (id int PRIMARY KEY, v text)")
    for name, first in (("kept", 1), ("dropped", 10_000)):
        with one.server.connect(one.name) as other:
            other.autocommit = False
            other.execute(_fill(first, first + 2000))
            other.execute(f"PREPARE TRANSACTION '{name}'")
    one.run("INSERT INTO t VALUES (-1, '')", "COMMIT PREPARED 'kept'", "ROLLBACK PREPARED 'dropped'")
    found = [(change.key or ("",))[0] for change in rows(one.items())]
    assert found == [-1, *range(1, 2002)]


def test_barriers_are_delivered_at_their_commit(stream: Start) -> None:
    one = stream("CREATE TABLE t (id int PRIMARY KEY)")
    one.run(
        "INSERT INTO t VALUES (1)",
        "SELECT pg_logical_emit_message(true, 'headwater', 'one')",
        "SELECT pg_logical_emit_message(true, 'somebody', 'else')",
        "BEGIN; SELECT pg_logical_emit_message(true, 'headwater', 'never'); ROLLBACK",
        "BEGIN; SELECT pg_logical_emit_message(true, 'headwater', 'two'); INSERT INTO t VALUES (2); COMMIT",
        "SELECT pg_logical_emit_message(false, 'headwater', 'three')",
    )
    items = one.items()
    assert [item.id and "" if isinstance(item, Transaction) else item.token for item in items] == [
        "",
        "one",
        "",
        "two",
        "three",
    ]


def test_transactions_before_the_resume_position_are_skipped(stream: Start) -> None:
    one = stream("CREATE TABLE t (id int PRIMARY KEY)")
    one.run(*(f"INSERT INTO t VALUES ({number})" for number in range(5)))
    assembly = one.assembly()
    first = [item for item in one.items(assembly) if isinstance(item, Transaction)]
    assert lsn_of(first[-1].position) == assembly.end
    one.reopen()
    resume = LogEnd(lsn_of(first[2].position))
    again = one.items(one.assembly(resume=resume))
    assert [change.key for change in rows(again)] == [(3,), (4,)]


@pytest.mark.parametrize("streaming", ["off", "on"])
def test_partly_logged_transaction_is_resumed_after_its_last_part(stream: Start, streaming: str) -> None:
    one = stream("CREATE TABLE t (id int PRIMARY KEY, v text)", streaming=streaming, version=2)
    one.run("INSERT INTO t VALUES (-1, '')", _fill(1, 1500), "INSERT INTO t VALUES (-2, '')")
    relations = Relations(Shapes(), Facts(one))
    whole = [item for item in one.items(one.assembly(relations)) if isinstance(item, Transaction)]
    for kept in range(len(whole)):
        last = whole[kept]
        of_it = [change for part in whole[: kept + 1] if part.id == last.id for change in part.changes]
        done = [change for change in of_it if change.op is not Op.SCHEMA_CHANGE]
        resume = LogEnd(lsn_of(last.position), 0 if last.last else len(of_it), 0 if last.last else len(done))
        one.reopen()
        known = {"t": whole[0].changes[0].table}
        again = one.items(one.assembly(Relations(Shapes(known), Facts(one)), resume))
        assert again == whole[kept + 1 :]


def test_relation_repeated_by_the_server_causes_no_schema_change(stream: Start) -> None:
    one = stream("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)", "ANALYZE t", "VACUUM FULL t")
    one.run("INSERT INTO t VALUES (2)")
    messages = one.messages()
    assert len([m for m in messages if m[:1] == b"R" and isinstance(decode(m), Relation)]) >= 1
    assert [change.op.word for change in changes(feed(one.assembly(), messages))] == [
        "schema_change",
        "insert",
        "insert",
    ]
