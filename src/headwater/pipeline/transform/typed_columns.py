"""Columns of text as decimals, dates and timestamps, by the kind and the declared type of the source. Pure.

The server sends the exact text of such values. A value that its type cannot hold exactly becomes null, and its literal
goes to `_misfit`: no value is rounded or moved. Times of day, JSON, UUIDs and arrays stay text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import pyarrow as pa

MAX_DIGITS = 38  # of a decimal of Spark

_DECIMAL = re.compile(r"(?:NUMERIC|DECIMAL|DEC|NUMBER|DECIMAL_TEXT) ?\( ?(\d+) ?(?:, ?([+-]?\d+) ?)?\)", re.I | re.A)
_ZONED = re.compile(r"TIMESTAMP(\(\d+\))? WITH TIME ZONE", re.I | re.A)
# SQLite's own functions and CURRENT_TIMESTAMP write times without a zone.
_ZONELESS = re.compile(
    r"TIMESTAMP(\(\d+\))? WITHOUT TIME ZONE|(TIMESTAMP|DATETIME|DATETIME_TEXT) ?(\(.*\))?", re.I | re.A
)
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896  # 0001-01-01 and 9999-12-31: the dates of Spark and of Python
_DAY_US = 86_400_000_000

_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9](\\.[0-9]{1,6})?)?"
_OFFSET = "(Z|[+-]([01][0-9]|2[0-3])(:?[0-5][0-9])?)"

_FIELDS = {"dec": "v", "date": "iso", "datetime": "iso"}  # kind -> the name of the text in its literal


def type_of(kind: str, declared: str) -> pa.DataType | None:
    """Return the type for a column of text; None if it stays text."""
    import pyarrow as pa

    declared = " ".join(declared.split())
    if kind == "date":
        return pa.date32()
    if kind == "datetime" and _ZONED.fullmatch(declared):
        return pa.timestamp("us", tz="UTC")
    if kind == "datetime" and _ZONELESS.fullmatch(declared):
        return pa.timestamp("us")
    found = _DECIMAL.fullmatch(declared) if kind in ("dec", "any") else None
    if found is None:
        return None
    digits, scale = int(found[1]), int(found[2] or 0)
    return pa.decimal128(digits, scale) if 0 < digits <= MAX_DIGITS and 0 <= scale <= digits else None


def is_convertible(field: pa.Field, wanted: pa.DataType) -> bool:
    """Return whether a column with the metadata of `field` holds text that may be converted to `wanted`."""
    import pyarrow as pa

    tests = {
        "dec": pa.types.is_decimal,
        "any": pa.types.is_decimal,
        "date": pa.types.is_date,
        "datetime": pa.types.is_timestamp,
    }
    return kind_of(field) in tests and tests[kind_of(field)](wanted)


def kind_of(field: pa.Field) -> str:
    """Return the kind of a column that the server sent; "" for a column that is none of the table."""
    kind: bytes = (field.metadata or {}).get(b"kind", b"")
    return kind.decode()


def converted(texts: pa.Array, wanted: pa.DataType) -> tuple[pa.Array, list[int]]:
    """Return `texts` as type `wanted`, and the indexes of values that it cannot hold exactly, which are null there."""
    import pyarrow as pa
    import pyarrow.compute as pc

    is_plain = pc.match_substring_regex(texts, _pattern(wanted))
    if pc.all(is_plain, min_count=0).as_py():
        found = _cast(texts, wanted)
    else:
        found = _cast(pc.if_else(is_plain, texts, pa.scalar(None, pa.string())), wanted)
        if pa.types.is_decimal(wanted):
            is_odd = pc.fill_null(pc.invert(is_plain), False)
            odd = [_decimal(text, wanted) for text in texts.filter(is_odd).to_pylist()]
            found = pc.replace_with_mask(found, is_odd, pa.array(odd, wanted))
    unfit: list[int] = pc.indices_nonzero(pc.and_(texts.is_valid(), found.is_null())).to_pylist()
    return found, unfit


def _pattern(wanted: pa.DataType) -> str:
    """Return the pattern of texts that Arrow converts exactly; it overflows silently on some longer decimals."""
    import pyarrow as pa

    if pa.types.is_decimal(wanted):
        whole, scale = wanted.precision - wanted.scale, wanted.scale
        number = f"(0|[1-9][0-9]{{0,{whole - 1}}})" if whole else "0"
        return rf"^-?{number}(\.[0-9]{{1,{scale}}})?$" if scale else f"^-?{number}$"
    if pa.types.is_date(wanted):
        return f"^{_DATE}$"
    return f"^{_DATE}[T ]{_CLOCK}{_OFFSET if wanted.tz else ''}$"


def _cast(texts: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Return `texts`, all of the pattern, as type `wanted`; null for days that no month has, and for other years."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_decimal(wanted):
        return texts.cast(wanted)
    try:
        found = texts.cast(wanted)
    except pa.ArrowInvalid:
        parse = _day if pa.types.is_date(wanted) else _moment
        return pa.array([None if text is None else parse(text) for text in texts.to_pylist()], wanted)
    day, number = (1, pa.int32()) if pa.types.is_date(wanted) else (_DAY_US, pa.int64())
    count = found.view(number)
    is_known = pc.and_(pc.greater_equal(count, _FIRST_DAY * day), pc.less(count, (_LAST_DAY + 1) * day))
    return pc.if_else(is_known, found, pa.scalar(None, wanted))


def _day(text: str) -> date | None:
    try:
        return date.fromisoformat(text)
    except ValueError:
        return None


def _moment(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
        return found.astimezone(UTC) if found.tzinfo else found
    except (ValueError, OverflowError):
        return None


def _decimal(text: str, wanted: pa.DataType) -> Decimal | None:
    """Return the number that the text says in any notation; None if `wanted` cannot hold it exactly."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        return None
    if not value.is_finite():
        return None
    sign, digits, exponent = value.as_tuple()
    kept = "".join(map(str, digits)).rstrip("0")
    if not kept:
        return Decimal(0)
    lowest = int(exponent) + len(digits) - len(kept)  # the exponent of the last digit that is not zero
    is_held = lowest >= -wanted.scale and lowest + len(kept) <= wanted.precision - wanted.scale
    return Decimal((sign, tuple(map(int, kept)), lowest)) if is_held else None


def literal(kind: str, text: str) -> dict[str, Any]:
    """Return the literal of a value that does not fit, for `_misfit`; a value of kind `any` is JSON itself."""
    if kind == "any":
        return {"t": "json", "v": msgspec.Raw(text.encode())}
    return {"t": kind, _FIELDS[kind]: text}


def with_misfits(texts: pa.Array, found: Mapping[int, Mapping[str, Any]], names: Sequence[str]) -> pa.Array:
    """Return the column `_misfit` with the literals `found` per row added, each row's in the order of `names`."""
    import pyarrow as pa

    made = texts.to_pylist()
    for at, literals in found.items():
        there = msgspec.json.decode(made[at], type=dict[str, msgspec.Raw]) if made[at] else {}
        every = {**there, **literals}
        ordered = {name: every[name] for name in sorted(every, key=names.index)}
        made[at] = msgspec.json.encode(ordered).decode()
    return pa.array(made, pa.string())
