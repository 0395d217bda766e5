"""PostgreSQL's types: their names, and the conversion of the stream's text into our values. Pure.

`sources/column_types.py` has the kind of each type. **A value that its kind cannot hold stays its exact text** (a `str`
in a column of that kind, as in SQLite): `infinity`, years before 1 or after 9999, offsets with seconds, numbers of more
than 20,000 digits, JSON that our parser refuses (a number beyond a double, half a surrogate pair). Dates and times are
written as by to_json: `2024-05-06T07:08:09.5`, `…+00:00`; `24:00:00` is a time. Numbers keep every digit, NaN and the
infinities; a real is its shortest exact text. The text depends on settings of the session: `SETTINGS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from uuid import UUID, SafeUUID

import msgspec

from headwater.model.literal import U64, Date, DateTime, Json, Time, Value, is_json
from headwater.sources.column_types import COLUMN_TYPES

# For every session whose text is converted here: the stream and the snapshots.
SETTINGS = {
    "client_encoding": "UTF8",
    "DateStyle": "ISO, YMD",
    "TimeZone": "UTC",
    "IntervalStyle": "postgres",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "lc_monetary": "C",
    "quote_all_identifiers": "off",
    "standard_conforming_strings": "on",
}
MAX_DIGITS = 20_000  # of a decimal literal

Convert = Callable[[str], Value]


class TypeFact(msgspec.Struct, frozen=True):
    """A type in the catalogue: its name by format_type, and the base type of a domain."""

    name: str
    base: int = 0


Types = Mapping[int, TypeFact]

BOOL, BYTEA, INT8, INT2, INT4, TEXT, OID, XID, CID = 16, 17, 20, 21, 23, 25, 26, 28, 29
JSON, FLOAT4, FLOAT8, BPCHAR, VARCHAR, DATE, TIME, TIMESTAMP = 114, 700, 701, 1042, 1043, 1082, 1083, 1114
TIMESTAMPTZ, TIMETZ, BIT, VARBIT, NUMERIC, UUID_, JSONB, XID8 = 1184, 1266, 1560, 1562, 1700, 2950, 3802, 5069

# The second name, where given, is the one that a Type message uses.
_NAMES = {
    BOOL: ("boolean", "bool"),
    BYTEA: ("bytea",),
    INT8: ("bigint", "int8"),
    INT2: ("smallint", "int2"),
    INT4: ("integer", "int4"),
    TEXT: ("text",),
    OID: ("oid",),
    XID: ("xid",),
    CID: ("cid",),
    JSON: ("json",),
    FLOAT4: ("real", "float4"),
    FLOAT8: ("double precision", "float8"),
    BPCHAR: ("character", "bpchar"),
    VARCHAR: ("character varying", "varchar"),
    DATE: ("date",),
    TIME: ("time without time zone", "time"),
    TIMESTAMP: ("timestamp without time zone", "timestamp"),
    TIMESTAMPTZ: ("timestamp with time zone", "timestamptz"),
    TIMETZ: ("time with time zone", "timetz"),
    BIT: ("bit",),
    VARBIT: ("bit varying", "varbit"),
    NUMERIC: ("numeric",),
    UUID_: ("uuid",),
    JSONB: ("jsonb",),
    XID8: ("xid8",),
}
_BY_NAME = {names[-1]: oid for oid, names in _NAMES.items()}


def named(schema: str, name: str) -> TypeFact:
    """Return the type of a Type message: a domain over a built-in type, or a type without a kind of its own."""
    base = _BY_NAME.get(name, 0) if schema == "pg_catalog" else 0
    return TypeFact(name if schema in ("pg_catalog", "public") else f"{schema}.{name}", base)


def base_of(oid: int, types: Types) -> int:
    """Return the base type, with all domains resolved."""
    for _ in range(32):  # domains over domains; bounded against cycles
        fact = types.get(oid)
        if fact is None or not fact.base:
            break
        oid = fact.base
    return oid


def declared_text(oid: int, typmod: int, types: Types) -> str:
    """Return the type as PostgreSQL's format_type writes it, as far as it is known."""
    fact = types.get(oid)
    name = fact.name if fact is not None else _NAMES.get(oid, (f"type {oid}",))[0]
    if typmod < 0 or (fact is not None and fact.base):
        return name
    element = name.removesuffix("[]")  # an array's typmod is that of its elements
    return _limited(element, typmod) + name[len(element) :]


def _limited(name: str, typmod: int) -> str:
    if name in ("character", "character varying"):
        return f"{name}({typmod - 4})"
    if name in ("bit", "bit varying"):
        return f"{name}({typmod})"
    if name.endswith(" time zone"):
        first, _, rest = name.partition(" ")
        return f"{first}({typmod}) {rest}"
    if name == "numeric":
        digits, scale = (typmod - 4) >> 16 & 0xFFFF, ((typmod - 4 & 0x7FF) ^ 1024) - 1024
        return f"{name}({digits},{scale})"
    return name


# --- values ----------------------------------------------------------------------------------------------

_OFFSET = re.compile(r"(.*\d)([+-]\d\d)(:\d\d)?\Z", re.ASCII)
_ESCAPED = re.compile(rb"\\(\\|[0-3][0-7]{2})")
TRUTH = {b"t": True, b"f": False}


def _bytes(text: str) -> Value:
    if text.startswith("\\x"):
        return bytes.fromhex(text[2:])
    return _ESCAPED.sub(lambda found: b"\\" if found[1] == b"\\" else bytes([int(found[1], 8)]), text.encode())


def _is_dated(text: str) -> bool:
    """Return whether `text` begins with a date of the years 1 to 9999."""
    return text[10:11] == " " and text[4] == "-" and text[-1] != "C"


def _timestamptz(text: str) -> Value:
    if not _is_dated(text):
        return text
    if text[-3:] == "+00":
        return DateTime(f"{text[:10]}T{text[11:]}:00")
    whole = _whole_offset(f"{text[:10]}T{text[11:]}")
    return text if whole is None else DateTime(whole)


def _timetz(text: str) -> Value:
    whole = _whole_offset(text)
    return text if whole is None else Time(whole)


def _whole_offset(text: str) -> str | None:
    """Return `text` with an offset in hours and minutes; None where it has seconds."""
    found = _OFFSET.match(text)
    return None if found is None else f"{found[1]}{found[2]}{found[3] or ':00'}"


_new, _set = object.__new__, object.__setattr__


def _uuid(text: str) -> Value:
    # Equivalent to UUID(text) without its checks, in a third of the time.
    found = _new(UUID)
    _set(found, "int", int(text.replace("-", ""), 16))
    _set(found, "is_safe", SafeUUID.unknown)
    return found


_CONVERTERS: dict[int, Convert] = {
    BOOL: lambda text: TRUTH[text.encode()],
    **dict.fromkeys((INT2, INT4, INT8, OID, XID, CID), int),
    XID8: lambda text: U64(int(text)),
    **dict.fromkeys((FLOAT4, FLOAT8), float),
    NUMERIC: lambda text: Decimal(text) if len(text) <= MAX_DIGITS else text,
    BYTEA: _bytes,
    **dict.fromkeys((JSON, JSONB), lambda text: Json(text) if is_json(text) else text),
    DATE: lambda text: Date(text) if len(text) == 10 and text[4] == "-" else text,
    TIME: Time,
    TIMETZ: _timetz,
    TIMESTAMP: lambda text: DateTime(f"{text[:10]}T{text[11:]}") if _is_dated(text) else text,
    TIMESTAMPTZ: _timestamptz,
    UUID_: _uuid,
}
_OIDS = {names[0]: oid for oid, names in _NAMES.items()}
_KINDS = {_OIDS[name]: kind for kind, row in COLUMN_TYPES.items() for name in row.postgres_reads}


def kind_of(oid: int, types: Types) -> str:
    """Return the kind of a column of this type."""
    return _KINDS.get(base_of(oid, types), "str")


def converter(oid: int, types: Types) -> Convert:
    """Return the converter of PostgreSQL's text. If it raises ValueError, LookupError or ArithmeticError, keep the
    text."""
    return _CONVERTERS.get(base_of(oid, types), str)
