"""Options of the data source: text in, checked values out. Spark hands over every key in lower case."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from headwater.client.protocol import parse_url
from headwater.errors import ConfigError
from headwater.model.clock import parse_ts, ts_ms
from headwater.model.database_name import real_name
from headwater.model.keys.key import Span
from headwater.model.suggestion import nearest

EVOLVE, PIN, FAIL = POLICIES = ("evolve", "pin", "fail")
EARLIEST, LATEST = "earliest", "latest"
ALL_TABLES = "*"


class RowsPiece(msgspec.Struct, frozen=True):
    """What one task reads of a snapshot: the rows of `span` as of offset `version`."""

    span: Span
    version: int


class LogPiece(msgspec.Struct, frozen=True):
    """What one task reads of the log: changes in (after, upto], of one span or of all keys."""

    after: int
    upto: int
    span: Span | None = None


class Options(msgspec.Struct, frozen=True):
    """What a reader was asked for."""

    url: str
    db: str = "main"
    table: str = ""
    tables: tuple[str, ...] = ()  # instead of `table`: changes of several, as JSON
    token_file: str | None = None
    columns: tuple[str, ...] = ()
    where: str | None = None
    generation: str | None = None
    version: int | None = None
    parts: tuple[RowsPiece, ...] | None = None
    after: int | None = None
    upto: int | None = None
    slices: tuple[LogPiece, ...] | None = None
    ends: bool = False
    shape: int | None = None
    rows_per_partition: int = 65_536  # four slices of the server's cache
    range_bytes: int | None = None
    starting_offset: str | int | None = None
    starting_ms: int | None = None
    max_rows: int | None = None
    policy: str = EVOLVE

    @property
    def is_log(self) -> bool:
        """Whether changes are read, not rows. Spark does not tell a source which of the two methods was called."""
        log_only = (self.after, self.slices, self.starting_offset, self.starting_ms)
        return bool(self.tables) or any(option is not None for option in log_only)

    @property
    def named_tables(self) -> tuple[str, ...]:
        """Of `tables`; none of them means all."""
        return () if self.tables == (ALL_TABLES,) else self.tables


def parse(given: Mapping[str, str]) -> Options:
    """Check all of it; ConfigError names the option that cannot be used."""
    found: dict[str, Any] = {}
    for key, text in given.items():
        found |= _read(key, text)
    if "url" not in found:
        raise ConfigError("option url is missing", hint="Such as http://127.0.0.1:7171.")
    options = Options(**found)
    _check(options)
    return options


def _read(key: str, text: str) -> dict[str, Any]:
    if key.lower() == "token":
        raise ConfigError(
            "a token in an option would be shown in plans and logs",
            hint="Use token_file, or set HEADWATER_TOKEN where the executors run.",
        )
    known = {name.lower(): name for name in _OPTIONS}
    name = known.get(key.lower())
    if name is None:
        raise ConfigError(f"unknown option {key!r}", hint=nearest(key.lower(), known))
    field, kind, words = _OPTIONS[name]
    try:
        value = kind(text)
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"option {name} is {text[:80]!r}, and must be {words}") from None
    return dict(zip(field.split(), value, strict=True)) if " " in field else {field: value}


def _check(options: Options) -> None:
    if bool(options.table) == bool(options.tables):
        raise ConfigError("one of the options table and tables is needed", hint="table=orders, or tables=orders,items")
    alone = {
        "tables and columns": options.tables and options.columns,
        "tables and where": options.tables and options.where is not None,
        "tables and version": options.tables and options.version is not None,
        "version and maxRowsPerTrigger": options.version is not None and options.max_rows is not None,
        "after and startingOffset": options.after is not None and options.starting_offset is not None,
        "after and startingTimestamp": options.after is not None and options.starting_ms is not None,
        "after and version": options.after is not None and options.version is not None,
        "ends without parts": options.ends and options.parts is None,
        "slices and parts": options.slices is not None and options.parts is not None,
        "upto without after": options.upto is not None and options.after is None,
        "startingOffset and startingTimestamp": options.starting_offset is not None and options.starting_ms is not None,
    }
    for words, holds in alone.items():
        if holds:
            raise ConfigError(f"options {words} do not go together")


# Values


def _integer(low: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if not low <= value < 2**63:
            raise ValueError
        return value

    return read


def _names(text: str) -> tuple[str, ...]:
    """Commas between them, or a JSON list where names hold commas."""
    names = json.loads(text) if text.lstrip().startswith("[") else [name.strip() for name in text.split(",")]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError
    return tuple(names)


def _tables(text: str) -> tuple[str, ...]:
    """Names, or the star alone: all tables and some of them would be two answers to one question."""
    names = _names(text)
    if ALL_TABLES in names and len(names) > 1:
        raise ValueError
    return names


def _version(text: str) -> tuple[str | None, int]:
    generation, _, offset = text.rpartition(".")
    return generation or None, _integer(0)(offset)


def _span(start: str, end: str | None) -> Span:
    return Span(bytes.fromhex(start), None if end is None else bytes.fromhex(end))


def _listed(text: str) -> list[Any]:
    found = json.loads(text)
    if not isinstance(found, list):
        raise ValueError
    return found


def _offset(value: Any) -> int:
    if type(value) is not int:
        raise ValueError
    return _integer(0)(str(value))


def _parts(text: str) -> tuple[RowsPiece, ...]:
    return tuple(RowsPiece(_span(start, end), _offset(version)) for start, end, version in _listed(text))


def _slices(text: str) -> tuple[LogPiece, ...]:
    pieces = [LogPiece(_offset(after), _offset(upto), _span(start, end)) for start, end, after, upto in _listed(text)]
    if any(piece.upto < piece.after for piece in pieces):
        raise ValueError
    return tuple(pieces)


def _start(text: str) -> str | int:
    return text.lower() if text.lower() in (EARLIEST, LATEST) else _integer(0)(text)


def _time(text: str) -> int:
    """Milliseconds since 1970, or ISO with an offset from UTC."""
    if text.replace(".", "").isdigit():
        return ts_ms(parse_ts(text))
    moment = datetime.datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError
    return int(moment.timestamp() * 1000)


def _policy(text: str) -> str:
    if text.lower() not in POLICIES:
        raise ValueError
    return text.lower()


def _flag(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _some(text: str) -> str:
    if not text:
        raise ValueError
    return text


_OPTIONS: dict[str, tuple[str, Callable[[str], Any], str]] = {  # option -> field(s), how it is read, in words
    "url": ("url", lambda text: parse_url(text).url, "the address of a server"),
    "token_file": ("token_file", _some, "the path of a file"),
    "db": ("db", real_name, "the name of a database"),
    "table": ("table", _some, "the name of a table"),
    "tables": ("tables", _tables, "names with commas between, or *"),
    "columns": ("columns", _names, "names with commas between, or a JSON list"),
    "where": ("where", _some, "a condition on the row"),
    "version": ("generation version", _version, "an offset, or <generation>.<offset>"),
    "generation": ("generation", _some, "the generation of a log"),
    "parts": ("parts", _parts, "JSON [[start, end or null, version], …] with keys in hex"),
    "ends": ("ends", _flag, "true or false"),
    "after": ("after", _integer(0), "an offset"),
    "upto": ("upto", _integer(0), "an offset"),
    "slices": ("slices", _slices, "JSON [[start, end or null, after, upto], …] with keys in hex"),
    "shape": ("shape", _integer(1), "the version of a table's shape"),
    "rowsPerPartition": ("rows_per_partition", _integer(1), "an integer from 1"),
    "rangeBytes": ("range_bytes", _integer(1), "an integer from 1"),
    "startingOffset": ("starting_offset", _start, "earliest, latest, or the offset after which to begin"),
    "startingTimestamp": ("starting_ms", _time, "milliseconds since 1970, or a time such as 2026-01-31T12:00:00Z"),
    "maxRowsPerTrigger": ("max_rows", _integer(1), "an integer from 1"),
    "schemaPolicy": ("policy", _policy, "evolve, pin or fail"),
}
