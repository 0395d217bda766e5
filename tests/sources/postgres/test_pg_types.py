"""Values of every type, decoded from a real stream, compared with PostgreSQL's own texts."""

from collections.abc import Callable
from decimal import Decimal
from uuid import UUID

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sources.postgres.pg_server import Stream, feed

from headwater.model.change import Op, Transaction
from headwater.model.literal import U64, Date, DateTime, Json, Time, Value, decimal_text, from_lit, to_lit
from headwater.model.row_msgpack import decode_row, encode_row
from headwater.model.table import Table
from headwater.sources.postgres.schema.relations import Relations
from headwater.sources.postgres.schema.shape_changes import Shapes
from headwater.sources.postgres.schema.table_facts import TableFact
from headwater.sources.postgres.types import (
    BIT,
    BPCHAR,
    NUMERIC,
    TIMESTAMPTZ,
    TypeFact,
    base_of,
    converter,
    declared_text,
    kind_of,
    named,
)

# Type to its kind and values of it.
TYPES: dict[str, tuple[str, list[str]]] = {
    "bool": ("bool", ["t", "f"]),
    "int2": ("i64", ["-32768", "32767"]),
    "int4": ("i64", ["-2147483648", "0"]),
    "int8": ("i64", ["-9223372036854775808", "9223372036854775807"]),
    "oid": ("i64", ["4294967295"]),
    "xid": ("i64", ["4294967295"]),
    "cid": ("i64", ["7"]),
    "xid8": ("u64", ["18446744073709551615"]),
    "float4": ("f64", ["1.1", "NaN", "Infinity", "-Infinity", "-0", "3.4028235e38", "1e-45"]),
    "float8": ("f64", ["0.1", "NaN", "Infinity", "-Infinity", "-0", "1.7976931348623157e308", "5e-324", "12345678.9"]),
    "numeric": ("dec", ["0.00", "-12.3400", "NaN", "Infinity", "-Infinity", "1" * 200 + ".5", "1e-100", "1e20000"]),
    "numeric(10,2)": ("dec", ["1234.5", "-0.01"]),
    "money": ("str", ["1234.56", "-0.5"]),
    "text": ("str", ["", " ", "naïve ☃ 🚰", "tab\tnew\nline", "\\x41", "{}", "null"]),
    "varchar(5)": ("str", ["abc", ""]),
    "char(5)": ("str", ["ab", ""]),
    '"char"': ("str", ["x"]),
    "name": ("str", ["somebody"]),
    "bytea": ("bytes", ["\\x", "\\x00ff5c", "plain \\\\ text"]),
    "date": (
        "date",
        ["2024-02-29", "0001-01-01", "9999-12-31", "infinity", "-infinity", "0044-03-15 BC", "10000-01-01"],
    ),
    "time": ("time", ["00:00", "23:59:59.999999", "24:00:00", "12:30:00.5"]),
    "timetz": ("time", ["12:00+02", "12:00:00.25-05:30", "24:00:00+00", "12:00:00+01:02:03"]),
    "timestamp": ("datetime", ["2024-05-06 07:08:09", "2024-05-06 07:08:09.12", "0001-01-01 00:00", "infinity"]),
    "timestamp(0)": ("datetime", ["-infinity", "9999-12-31 23:59:59", "294276-12-31 23:59:59", "4713-01-01 00:00 BC"]),
    "timestamptz": ("datetime", ["2024-05-06 07:08:09.5+02", "1850-01-01 00:00+00", "infinity", "0001-01-01 BC"]),
    "interval": ("str", ["1 year 2 mons -3 days 04:05:06.7", "0", "-00:00:01"]),
    "uuid": ("uuid", ["00000000-0000-0000-0000-000000000000", "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11"]),
    "json": (
        "json",
        ['{"b":1,  "a":[1.50,null]}', "null", '"x"', "1e400", '"\\ud800"', '{"a":1,"a":2}', "12345678901234567890"],
    ),
    "jsonb": ("json", ['{"b":1,  "a":[1.50,null]}', "null", "[]", "1e400", '"\\u2603"']),
    "jsonpath": ("str", ["$.a[*]"]),
    "xml": ("str", ["<a>1</a>"]),
    "bit(4)": ("str", ["1010"]),
    "varbit": ("str", ["", "101"]),
    "inet": ("str", ["10.0.0.1/8", "::1"]),
    "cidr": ("str", ["10.0.0.0/8"]),
    "macaddr": ("str", ["08:00:2b:01:02:03"]),
    "macaddr8": ("str", ["08:00:2b:01:02:03:04:05"]),
    "point": ("str", ["(1,2)"]),
    "line": ("str", ["{1,2,3}"]),
    "lseg": ("str", ["[(0,0),(1,1)]"]),
    "box": ("str", ["(1,1),(0,0)"]),
    "path": ("str", ["((0,0),(1,1))"]),
    "polygon": ("str", ["((0,0),(1,1),(1,0))"]),
    "circle": ("str", ["<(0,0),1>"]),
    "tsvector": ("str", ["a fat cat"]),
    "tsquery": ("str", ["fat & cat"]),
    "int4range": ("str", ["[1,5)", "empty"]),
    "tstzrange": ("str", ["[2024-01-01, infinity)"]),
    "nummultirange": ("str", ["{[1,2),[3,4)}"]),
    "pg_lsn": ("str", ["16/B374D848"]),
    "tid": ("str", ["(0,1)"]),
    "regclass": ("str", ["pg_class"]),
    "pg_snapshot": ("str", ["10:20:10,14"]),
    "int2vector": ("str", ["1 2"]),
    "oidvector": ("str", ["1 2"]),
    "int4[]": ("str", ["{1,NULL,3}", "{{1,2},{3,4}}", "[0:1]={1,2}"]),
    "text[]": ("str", ['{"a,b","c\\"d",NULL,"NULL",""}']),
    "bool[]": ("str", ["{t,f}"]),
    "json[]": ("str", ['{"{\\"a\\":1}"}']),
    "numeric(6,1)[]": ("str", ["{1.25,NULL}"]),
    "timestamptz(2)[]": ("str", ["{2024-01-01 00:00+00}"]),
    "mood": ("str", ["sad", "it's ok"]),
    "mood[]": ("str", ["{sad}"]),
    "positive": ("i64", ["5"]),
    "very_positive": ("i64", ["50"]),
    "stamp": ("datetime", ["2024-01-01 00:00+00"]),
    "moods": ("str", ["{sad}"]),
    "pair": ("str", ['(1,"a,b")']),
    "floats": ("str", ["[1.5,2.5)"]),
    "tenant.kind": ("str", ["big"]),
}
MADE = (
    "CREATE TYPE mood AS ENUM ('sad', 'it''s ok')",
    "CREATE DOMAIN positive AS int4 CHECK (VALUE > 0)",
    "CREATE DOMAIN very_positive AS positive CHECK (VALUE > 10)",
    "CREATE DOMAIN stamp AS timestamptz(3)",
    "CREATE DOMAIN moods AS mood[]",
    "CREATE TYPE pair AS (a int, b text)",
    "CREATE TYPE floats AS RANGE (subtype = float8)",
    "CREATE SCHEMA tenant",
    "CREATE TYPE tenant.kind AS ENUM ('big')",
)
DEEPEST = max(len(values) for _, values in TYPES.values())


def one_of(stream: Callable[..., Stream]) -> tuple[Stream, list[str]]:
    """Create a table with a column of every type that the server has, and rows with all values; return the types."""
    one = stream(*MADE)
    names = [name for name in TYPES if name != "xml" or _has_xml(one)]
    columns = ", ".join(f"c{place} {name}" for place, name in enumerate(names))
    one.run(f"CREATE TABLE every (id int PRIMARY KEY, {columns})")
    for row in range(DEEPEST + 1):  # the last one has NULLs only
        values = [TYPES[name][1][row] if row < len(TYPES[name][1]) else None for name in names]
        one.db.execute(
            f"INSERT INTO every VALUES ({row}, {', '.join(f'%s::{name}' for name in names)})",
            values,
        )
    return one, names


def _has_xml(one: Stream) -> bool:
    try:
        one.run("SELECT '<a/>'::xml")
    except psycopg.errors.FeatureNotSupported:  # built without libxml
        return False
    return True


def text_of(value: Value) -> str | None:
    """Return the text that PostgreSQL would print."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, U64):
        return str(value.v)
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    if isinstance(value, Json):
        return value.text
    if isinstance(value, Decimal):
        return decimal_text(value)
    assert isinstance(value, (int, UUID, Date))
    return value.iso if isinstance(value, Date) else str(value)


def check(name: str, value: Value, shown: str | None, as_json: str | None) -> None:
    if isinstance(value, float):
        assert shown is not None
        assert repr(value) == repr(float(shown)), name
    elif isinstance(value, DateTime):
        assert value.iso == as_json, name  # PostgreSQL's own ISO form
    elif isinstance(value, Time):
        assert value.iso == (as_json if name == "time" else _whole(shown)), name
    else:
        assert text_of(value) == shown, name


def _whole(text: str | None) -> str:
    assert text is not None
    return text if text[-3] == ":" and text[-6] in "+-" else f"{text}:00"


def test_every_type_is_decoded_as_the_database_shows_it(stream: Callable[..., Stream]) -> None:
    one, names = one_of(stream)
    (table, rows) = _decoded(one)
    kinds = {name: column.kind for name, column in zip(names, table.columns[1:], strict=True)}
    assert kinds == {name: TYPES[name][0] for name in names}
    assert [column.declared for column in table.columns] == _declared(one)
    shown = _shown(one, ", ".join(f"c{place}" for place in range(len(names))))
    dates = [
        f"to_json(c{p}) #>> '{{}}'" if TYPES[n][0] in ("datetime", "time") else "NULL" for p, n in enumerate(names)
    ]
    as_json = _shown(one, ", ".join(dates))
    assert len(rows) == DEEPEST + 1
    for row, texts, jsons in zip(rows, shown, as_json, strict=True):
        for name, value, text, iso in zip(names, row[1:], texts, jsons, strict=True):
            check(name, value, text, iso)
            if not isinstance(value, Json):  # sent as what it means: its spaces do not come back
                assert repr(from_lit(to_lit(value))) == repr(value), name
        assert repr(decode_row(encode_row(row))) == repr(row)


def _declared(one: Stream) -> list[str]:
    rows = one.db.execute(
        "SELECT format_type(atttypid, atttypmod) FROM pg_attribute"
        " WHERE attrelid = 'every'::regclass AND attnum > 0 ORDER BY attnum"
    ).fetchall()
    return [name for (name,) in rows]


def _decoded(one: Stream) -> tuple[Table, list[tuple[Value, ...]]]:
    found = [c for item in one.items() if isinstance(item, Transaction) for c in item.changes if c.op is Op.INSERT]
    return found[0].table, [change.after or () for change in found]


def _shown(one: Stream, columns: str) -> list[tuple[str | None, ...]]:
    """Return the column texts as PostgreSQL sends them."""
    answer = one.db.pgconn.exec_(f"SELECT {columns} FROM every ORDER BY id".encode())
    cells = [[answer.get_value(row, at) for at in range(answer.nfields)] for row in range(answer.ntuples)]
    return [tuple(None if cell is None else cell.decode() for cell in row) for row in cells]


def test_postgresql_value_outside_its_kind_is_delivered_as_text(stream: Callable[..., Stream]) -> None:
    one, names = one_of(stream)
    _, rows = _decoded(one)
    odd = {
        (name, value)
        for row in rows
        for name, value in zip(names, row[1:], strict=True)
        if isinstance(value, str) and TYPES[name][0] != "str"
    }
    assert {(name, value) for name, value in odd if name != "numeric"} == {
        ("date", "infinity"),
        ("date", "-infinity"),
        ("date", "0044-03-15 BC"),
        ("date", "10000-01-01"),
        ("timetz", "12:00:00+01:02:03"),
        ("timestamp", "infinity"),
        ("timestamp(0)", "-infinity"),
        ("timestamp(0)", "294276-12-31 23:59:59"),
        ("timestamp(0)", "4713-01-01 00:00:00 BC"),
        ("timestamptz", "infinity"),
        ("timestamptz", "0001-01-01 00:00:00+00 BC"),
        ("json", "1e400"),
        ("json", '"\\ud800"'),
    }
    assert {len(value) for name, value in odd if name == "numeric"} == {20_001}


def test_null_of_every_built_in_type_is_decoded(stream: Callable[..., Stream]) -> None:
    one = stream()
    names = one.db.execute(
        "SELECT format_type(oid, NULL) FROM pg_type WHERE typtype IN ('b', 'r', 'm') AND oid < 10000"
        " AND typname !~ '^_?pg_' AND typname NOT IN ('gtsvector', 'unknown', 'any', '_cstring')"
        " ORDER BY oid"
    ).fetchall()
    assert len(names) > 120
    one.run("CREATE TABLE every (id int PRIMARY KEY, " + ", ".join(f"c{n} {t}" for n, (t,) in enumerate(names)) + ")")
    one.run("INSERT INTO every VALUES (1)")
    table, rows = _decoded(one)
    assert [column.declared for column in table.columns] == _declared(one)
    assert rows == [(1, *[None] * len(names))]


def test_values_of_domains_are_decoded_without_catalogue_facts(stream: Callable[..., Stream]) -> None:
    class Nothing:
        def table(self, oid: int) -> TableFact | None:
            return None

        def types(self) -> dict[int, TypeFact]:
            return {}

        def settle(self, xid: int) -> None:
            pass

    one = stream(*MADE, "CREATE TABLE t (id int PRIMARY KEY, a very_positive, b mood, c moods, d pair)")
    one.run("""INSERT INTO t VALUES (1, 20, 'sad', '{sad}', '(1,a)')""")
    items = feed(one.assembly(Relations(Shapes(), Nothing())), one.messages())
    assert isinstance(items[0], Transaction)
    assert items[0].changes[1].after == (1, 20, "sad", "{sad}", "(1,a)")


def test_escaped_bytes_and_times_of_any_zone_are_decoded() -> None:
    assert converter(17, {})("a\\\\b\\000\\377") == b"a\\b\x00\xff"
    read = converter(TIMESTAMPTZ, {})
    assert read("2024-05-06 07:08:09.5+05:30") == DateTime("2024-05-06T07:08:09.5+05:30")
    assert read("2024-05-06 07:08:09-03") == DateTime("2024-05-06T07:08:09-03:00")
    assert read("1850-01-01 00:00:00+00:53:28") == "1850-01-01 00:00:00+00:53:28"


@given(st.uuids())
def test_uuid_from_the_fast_converter_equals_the_uuid(value: UUID) -> None:
    found = converter(2950, {})(str(value))
    assert isinstance(found, UUID)
    assert (found, hash(found), repr(found), found.is_safe) == (value, hash(value), repr(value), value.is_safe)


@given(st.decimals())
def test_decimals_keep_their_digits(value: Decimal) -> None:
    if value.is_snan() or (value.is_nan() and str(value) != "NaN"):
        return
    text = decimal_text(value)
    assert text_of(converter(NUMERIC, {})(text)) == text


def test_domain_is_resolved_to_its_base_type_and_a_cycle_to_text() -> None:
    types = {50_000: TypeFact("d", 50_001), 50_001: TypeFact("e", 23), 60_000: TypeFact("x", 60_000)}
    assert (base_of(50_000, types), kind_of(50_000, types)) == (23, "i64")
    assert kind_of(60_000, types) == "str"
    assert named("pg_catalog", "int4") == TypeFact("int4", 23)
    assert named("tenant", "int4") == TypeFact("tenant.int4")


@pytest.mark.parametrize(
    ("oid", "typmod", "text"),
    [
        (1043, 24, "character varying(20)"),
        (BPCHAR, 9, "character(5)"),
        (NUMERIC, (10 << 16 | 2) + 4, "numeric(10,2)"),
        (NUMERIC, (3 << 16 | (-2 & 0x7FF)) + 4, "numeric(3,-2)"),
        (TIMESTAMPTZ, 3, "timestamp(3) with time zone"),
        (BIT, 4, "bit(4)"),
        (23, -1, "integer"),
        (99_999, -1, "type 99999"),
    ],
)
def test_declared_types_are_written_as_postgresql_writes_them(oid: int, typmod: int, text: str) -> None:
    assert declared_text(oid, typmod, {}) == text
