"""Text as decimals, dates and timestamps: a value keeps its meaning exactly, or stands in `_misfit`."""

from __future__ import annotations

import json
import re
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headwater.model import arrow
from headwater.model.literal import UNAVAILABLE, Date, DateTime, Value, decimal_text, is_date, is_datetime
from headwater.model.table import Column, Table
from headwater.pipeline.transform.schema import TEXT, TYPED, changes_schema, fit, has_forms, rows_schema
from headwater.pipeline.transform.typed_columns import converted, type_of

ZONED, ZONELESS = pa.timestamp("us", tz="UTC"), pa.timestamp("us")


@pytest.mark.parametrize(
    ("kind", "declared", "expected"),
    [
        ("dec", "numeric(10,2)", pa.decimal128(10, 2)),
        ("dec", "numeric(38,38)", pa.decimal128(38, 38)),
        ("dec", "DECIMAL_TEXT(5)", pa.decimal128(5, 0)),
        ("dec", "numeric", None),  # any number of digits
        ("dec", "numeric(39,2)", None),
        ("dec", "numeric(3,-2)", None),
        ("dec", "numeric(2,5)", None),
        ("dec", "price", None),  # a domain
        ("any", "DECIMAL(10, 2)", pa.decimal128(10, 2)),
        ("any", "Numeric ( 7 )", pa.decimal128(7, 0)),
        ("any", "DECIMAL", None),
        ("any", "", None),
        ("str", "numeric(10,2)", None),
        ("date", "date", pa.date32()),
        ("date", "birthday", pa.date32()),  # a domain over date
        ("datetime", "timestamp with time zone", ZONED),
        ("datetime", "timestamp(3) with time zone", ZONED),
        ("datetime", "timestamp without time zone", ZONELESS),
        ("datetime", "timestamp(0) without time zone", ZONELESS),
        ("datetime", "DATETIME", ZONELESS),
        ("datetime", "datetime(6)", ZONELESS),
        ("datetime", "TIMESTAMP", ZONELESS),
        ("datetime", "moment", None),  # a domain: with or without a zone
        ("time", "time without time zone", None),
        ("json", "jsonb", None),
        ("uuid", "uuid", None),
        ("str", "integer[]", None),
    ],
)
def test_type_follows_the_kind_and_the_declared_type(kind: str, declared: str, expected: pa.DataType | None) -> None:
    assert type_of(kind, declared) == expected


def checked(text: str, wanted: pa.DataType) -> Any:
    """Return the converted value, or None if it is a misfit; the value must not depend on its neighbours."""
    good = GOOD[wanted.id] + ("Z" if wanted.equals(ZONED) else "")
    alone, unfit = converted(pa.array([text]), wanted)
    beside, others = converted(pa.array([good, text, None, good]), wanted)
    assert alone.type.equals(wanted) and beside.type.equals(wanted)
    assert (alone[0], [1] if unfit else []) == (beside[1], others)
    assert beside[0].as_py() == beside[3].as_py() is not None and beside[2].as_py() is None
    assert unfit == [] or (unfit == [0] and alone[0].as_py() is None)
    return None if unfit else alone[0].as_py()


GOOD = {pa.decimal128(1).id: "0", pa.date32().id: "2026-01-31", ZONELESS.id: "2026-01-31T01:02:03"}


def fits(value: Decimal, digits: int, scale: int) -> bool:
    """Return whether numeric(digits, scale) holds the value exactly."""
    exact = Context(prec=200)
    scaled = value.scaleb(scale, exact) if value.is_finite() else value
    return value.is_finite() and exact.abs(scaled) < 10**digits and exact.remainder(scaled, Decimal(1)) == 0


@st.composite
def decimals(draw: st.DrawFn) -> tuple[str, int, int]:
    digits = draw(st.integers(1, 38))
    scale = draw(st.integers(0, digits))
    most = 10 ** draw(st.sampled_from([1, digits, digits + 1, 38, 40]))
    places = draw(st.sampled_from([scale, max(scale - 1, 0), scale + 1, 0]) | st.integers(0, 42))
    return decimal_text(Decimal(draw(st.integers(-most, most))).scaleb(-places, Context(prec=99))), digits, scale


@given(decimals())
@example(("9687283695810137885971654614.534940459", 38, 24))  # where Arrow alone overflows to another number
@example(("-" + "9" * 38, 38, 0))
@example(("0." + "9" * 38, 38, 38))
def test_decimal_is_kept_exactly_or_is_a_misfit(case: tuple[str, int, int]) -> None:
    text, digits, scale = case
    found = checked(text, pa.decimal128(digits, scale))
    assert found == Decimal(text) if fits(Decimal(text), digits, scale) else found is None


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "12.345", "1000", '"12.5"', "abc", "true", "[1]", ""])
def test_text_that_is_no_number_of_the_type_is_a_misfit(text: str) -> None:
    assert checked(text, pa.decimal128(5, 2)) is None


@pytest.mark.parametrize(
    "text", ["0." + "0" * 40 + "1", "4.8e-90", "1e400", "1e-400", "1e-3", "9" * 60, "-1" + "0" * 39, "1e-99999999999"]
)
def test_number_beyond_every_decimal_is_a_misfit(text: str) -> None:
    """Arrow alone makes a zero of some of them."""
    assert checked(text, pa.decimal128(5, 2)) is None


@pytest.mark.parametrize("text", ["1.5" + "0" * 60, "0" * 60 + "1.5", "15e-1", "0.15E1", "150" + "0" * 40 + "e-42"])
def test_number_with_more_places_than_needed_is_kept(text: str) -> None:
    assert checked(text, pa.decimal128(5, 2)) == Decimal("1.5")


@pytest.mark.parametrize(("text", "value"), [("1e2", "100"), ("1.5e-1", "0.15"), ("12.0", "12"), ("-0.5", "-0.5")])
def test_json_number_of_sqlite_is_read_in_every_notation(text: str, value: str) -> None:
    assert checked(text, pa.decimal128(5, 2)) == Decimal(value)


def day_of(text: str) -> date | None:
    try:
        return date.fromisoformat(text)
    except ValueError:
        return None


@given(st.dates().map(str) | st.from_regex(re.compile(r"\d{4}-\d\d-\d\d", re.A), fullmatch=True))
def test_date_is_kept_exactly_or_is_a_misfit(text: str) -> None:
    assert is_date(text)
    assert checked(text, pa.date32()) == day_of(text)


@pytest.mark.parametrize("text", ["0000-01-01", "2023-02-29", "2026-13-01", "infinity", "10000-01-01", "0044-03-15 BC"])
def test_date_outside_the_calendar_of_spark_is_a_misfit(text: str) -> None:
    assert checked(text, pa.date32()) is None


TIMES = st.from_regex(
    re.compile(
        r"(2026|0001|9999|\d{4})-(0[1-9]|1[0-2]|\d\d)-(0[1-9]|[12]\d|\d\d)[T ][012]\d:[0-6]\d(:[0-6]\d(\.\d{1,9})?)?",
        re.A,
    ),
    fullmatch=True,
)
OFFSETS = st.sampled_from(["", "Z", "+00:00", "-00:00", "+05:30", "-0930", "+14", "-12:00"])


def moment_of(text: str, *, is_zoned: bool) -> datetime | None:
    """Return the time of Python's own parser; None where it lacks the zone, has one too many, or needs more digits."""
    seconds, dot, rest = text.partition(".")
    fraction = re.match(r"\d*", rest)
    assert fraction
    if fraction[0][6:] or text[11:13] == "24":
        return None
    try:
        found = datetime.fromisoformat(text)
        if (found.tzinfo is not None) is not is_zoned:
            return None
        return found.astimezone(UTC) if is_zoned else found
    except (ValueError, OverflowError):
        return None


@given(TIMES, OFFSETS)
def test_timestamp_is_kept_exactly_or_is_a_misfit(text: str, offset: str) -> None:
    text += offset
    assert is_datetime(text)
    assert checked(text, ZONED) == moment_of(text, is_zoned=True)
    assert checked(text, ZONELESS) == moment_of(text, is_zoned=False)


@given(st.datetimes())
def test_every_timestamp_of_python_is_kept(at: datetime) -> None:
    assert checked(at.isoformat(), ZONELESS) == at
    assert checked(at.isoformat() + "+00:00", ZONED) == at.replace(tzinfo=UTC)


TABLE = Table(
    "t",
    (
        Column("id", "i64"),
        Column("price", "dec", "numeric(5,2)"),
        Column("rough", "any", "DECIMAL(5,2)"),
        Column("day", "date", "date"),
        Column("at", "datetime", "timestamp with time zone"),
        Column("local", "datetime", "timestamp without time zone"),
        Column("note", "str", "text"),
    ),
    ("id",),
)
VALUES = {
    "price": st.decimals(allow_nan=True, allow_infinity=True, places=None) | st.just("text in a number"),
    "rough": st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    "day": st.dates().map(str).map(Date) | st.sampled_from([Date("0000-01-01"), Date("2026-02-30"), "infinity"]),
    "at": st.datetimes().map(lambda at: DateTime(f"{at.isoformat()}+00:00")) | st.just(DateTime("2026-01-01 10:00")),
    "local": st.datetimes().map(lambda at: DateTime(at.isoformat())) | st.just(DateTime("2026-01-01T10:00:00Z")),
    "note": st.sampled_from(["a", UNAVAILABLE]),
}
ROWS = st.lists(st.tuples(st.integers(0, 9), *(st.none() | value for value in VALUES.values())), max_size=6)


def canonical(column: str, value: Any) -> Any:
    """Return the meaning of a text as it was sent."""
    if value is None or column in ("id", "note"):
        return value
    if column in ("price", "rough"):
        return Decimal(value)
    return day_of(value) if column == "day" else moment_of(value, is_zoned=column == "at")


@given(ROWS)
def test_typed_row_has_every_value_of_the_sent_row_in_a_column_or_in_misfit(rows: list[tuple[Value, ...]]) -> None:
    sent = arrow.rows_batch(TABLE, rows)
    texts, typed = fit(sent, rows_schema(TABLE)).to_pylist(), fit(sent, rows_schema(TABLE, types=TYPED))
    assert typed.schema.equals(rows_schema(TABLE, types=TYPED))
    for was, now in zip(texts, typed.to_pylist(), strict=True):
        before, after = json.loads(was.pop("_misfit") or "{}"), json.loads(now.pop("_misfit") or "{}")
        assert {name: after[name] for name in before} == before
        assert list(after) == [name for name in TABLE.names if name in after]
        for name, text in was.items():
            if name not in after or name in before:
                assert now[name] == canonical(name, text)
                continue
            assert now[name] is None and text is not None
            lit = after[name]
            expected = json.loads(text) if lit["t"] == "json" else text
            assert lit == {"t": lit["t"], ("iso" if name in ("day", "at", "local") else "v"): expected}


def test_misfits_of_both_sides_are_one_object_in_column_order() -> None:
    row: tuple[Value, ...] = (1, Decimal("12.345"), 0.125, "infinity", DateTime("2026-01-01T10:00"), None, UNAVAILABLE)
    (found,) = fit(arrow.rows_batch(TABLE, [row]), rows_schema(TABLE, types=TYPED)).column("_misfit").to_pylist()
    assert found == (
        '{"price":{"t":"dec","v":"12.345"},"rough":{"t":"json","v":0.125},"day":{"t":"str","v":"infinity"},'
        '"at":{"t":"datetime","iso":"2026-01-01T10:00"},"note":{"t":"unavailable"}}'
    )


def test_key_columns_keep_their_text() -> None:
    columns = (Column("day", "date", "date"), Column("price", "dec", "numeric(5,2)"), Column("due", "date", "date"))
    table = Table("t", columns, ("day", "price"))
    assert [field.type for field in rows_schema(table, types=TYPED)] == [
        pa.string(),
        pa.string(),
        pa.date32(),
        pa.string(),
    ]
    sent = arrow.rows_batch(table, [(Date("2026-02-30"), Decimal("NaN"), Date("2026-02-28"))])
    (row,) = fit(sent, rows_schema(table, types=TYPED)).to_pylist()
    assert row == {"day": "2026-02-30", "price": "NaN", "due": date(2026, 2, 28), "_misfit": None}


def test_table_without_decimals_dates_and_timestamps_has_one_form() -> None:
    assert has_forms(TABLE)
    assert not has_forms(
        Table("t", (Column("id", "u64"), Column("at", "time"), Column("n", "dec", "numeric")), ("id",))
    )
    assert not has_forms(Table("t", (Column("day", "date", "date"),), ("day",)))


def test_text_form_has_no_typed_columns() -> None:
    assert rows_schema(TABLE, types=TEXT) == rows_schema(TABLE)
    assert {str(field.type) for field in rows_schema(TABLE)} == {"int64", "string"}
    assert [str(field.type) for field in changes_schema(TABLE, types=TYPED)][:-6] == [
        "int64",
        "decimal128(5, 2)",
        "decimal128(5, 2)",
        "date32[day]",
        "timestamp[us, tz=UTC]",
        "timestamp[us]",
        "string",
    ]


def test_many_misfits_among_many_values_are_found() -> None:
    texts = [f"{number}.{number % 1000:03}" for number in range(3000)]
    found, unfit = converted(pa.array(texts), pa.decimal128(6, 2))
    assert unfit == [number for number in range(3000) if number % 10]
    assert found.null_count == len(unfit) and found[1230].as_py() == Decimal("1230.23")
