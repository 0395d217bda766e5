"""Options of the data source, parsed from text and checked. Spark passes every key in lower case.

For CREATE TABLE … USING headwater OPTIONS (…) Spark passes each option twice, once as `option.<name>`, among properties
of the table that are no options. A query of that table gets none of them, only the columns: they carry the options.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from headwater.client.protocol import parse_url
from headwater.config.reader import checked, unknown
from headwater.config.setting_types import TEXT, SettingType, integer, need
from headwater.errors import ConfigError
from headwater.model.clock import parse_ts, ts_ms
from headwater.model.database_name import real_name
from headwater.model.keys.key import Span
from headwater.pipeline.sinks.sink import Part
from headwater.pipeline.transform import schema

EVOLVE, PIN, FAIL = POLICIES = ("evolve", "pin", "fail")
EARLIEST, LATEST = "earliest", "latest"
ALL_TABLES = "*"
PROVIDER, OPTION_PREFIX = "provider", "option."  # a property of every table in Spark's catalog; marks its options
METADATA = "headwater.options"  # of a column of such a table: its options as JSON


class LogPiece(msgspec.Struct, frozen=True):
    """The part of the log that one task reads: changes in (after, upto], of one span or of all keys."""

    after: int
    upto: int
    span: Span | None = None


class Options(msgspec.Struct, frozen=True):
    """The checked options of a reader."""

    url: str
    db: str = "main"
    table: str = ""
    tables: tuple[str, ...] = ()  # instead of `table`: changes of several tables, as JSON
    token_file: str | None = None
    columns: tuple[str, ...] = ()
    where: str | None = None
    generation: str | None = None
    version: int | None = None
    parts: tuple[Part, ...] | None = None
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
    types: str = schema.TYPED

    @property
    def is_log(self) -> bool:
        """Return whether changes are read, not rows. Spark does not pass which of the two methods was called."""
        log_only = (self.after, self.slices, self.starting_offset, self.starting_ms)
        return bool(self.tables) or any(option is not None for option in log_only)

    @property
    def form(self) -> str:
        """Return the form of decimals, dates and timestamps; rows of several tables are JSON, which keeps the text."""
        return schema.TEXT if self.tables else self.types

    @property
    def named_tables(self) -> tuple[str, ...]:
        """Return the names in `tables`; empty means all tables."""
        return () if self.tables == (ALL_TABLES,) else self.tables


def parse(given: Mapping[str, str]) -> Options:
    """Return the checked options; raise ConfigError for an invalid option."""
    found: dict[str, Any] = {}
    for key, text in given.items():
        found |= _read(key, text)
    if "url" not in found:
        raise ConfigError(
            "option url is missing",
            hint="Such as http://127.0.0.1:7171. CREATE TABLE keeps options only without columns.",
        )
    options = Options(**found)
    _check(options)
    return options


def options_of_table(given: Mapping[str, str]) -> dict[str, str] | None:
    """Return the options among what Spark passes for CREATE TABLE; None if `given` are the options of a reader."""
    if PROVIDER not in given:
        return None
    return {key.removeprefix(OPTION_PREFIX): text for key, text in given.items() if key.startswith(OPTION_PREFIX)}


def _read(key: str, text: str) -> dict[str, Any]:
    if key.lower() == "token":
        raise ConfigError(
            "a token in an option would be shown in plans and logs",
            hint="Use token_file, or set HEADWATER_TOKEN where the executors run.",
        )
    known = {name.lower(): name for name in _OPTIONS}
    if key.lower() not in known:
        raise unknown("option", key, known)
    name = known[key.lower()]
    field, kind = _OPTIONS[name]
    value = checked(f"option {name}", kind.of_text, text, shown=repr(text[:80]))
    return dict(zip(field.split(), value, strict=True)) if " " in field else {field: value}


def _check(options: Options) -> None:
    if bool(options.table) == bool(options.tables):
        raise ConfigError("set exactly one of the options table and tables", hint="table=orders or tables=orders,items")
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
            raise ConfigError(f"this combination of options is not possible: {words}")


# Values

_OFFSET = integer(0)._replace(words="an offset")
_offset = _OFFSET.check


def _names(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list, or in a JSON list if names contain commas."""
    names = json.loads(text) if text.lstrip().startswith("[") else [name.strip() for name in text.split(",")]
    need(names and all(isinstance(name, str) and name for name in names))
    return tuple(names)


def _tables(text: str) -> tuple[str, ...]:
    """Return the names of tables, or `*`; ValueError for `*` together with names."""
    names = _names(text)
    need(ALL_TABLES not in names or len(names) == 1)
    return names


def _version(text: str) -> tuple[str | None, int]:
    generation, _, offset = text.rpartition(".")
    return generation or None, _offset(int(offset))


def _span(start: str, end: str | None) -> Span:
    return Span(bytes.fromhex(start), None if end is None else bytes.fromhex(end))


def _listed(text: str) -> list[Any]:
    found = json.loads(text)
    need(isinstance(found, list))
    return list(found)


def _parts(text: str) -> tuple[Part, ...]:
    return tuple(Part(_span(start, end), _offset(version)) for start, end, version in _listed(text))


def _slices(text: str) -> tuple[LogPiece, ...]:
    pieces = [LogPiece(_offset(after), _offset(upto), _span(start, end)) for start, end, after, upto in _listed(text)]
    need(all(piece.after <= piece.upto for piece in pieces))
    return tuple(pieces)


def _start(text: str) -> str | int:
    return text.lower() if text.lower() in (EARLIEST, LATEST) else _offset(int(text))


def _time(text: str) -> int:
    """Return milliseconds since 1970 of a number, or of an ISO time with an offset from UTC."""
    if text.replace(".", "").isdigit():
        return ts_ms(parse_ts(text))
    moment = datetime.datetime.fromisoformat(text)
    need(moment.tzinfo)
    return int(moment.timestamp() * 1000)


def _policy(text: str) -> str:
    need(text.lower() in POLICIES)
    return text.lower()


def _form(text: str) -> str:
    need(text.lower() in schema.FORMS)
    return text.lower()


def _flag(text: str) -> bool:
    need(text.lower() in ("true", "false"))
    return text.lower() == "true"


_OPTIONS: dict[str, tuple[str, SettingType]] = {  # option -> the field or fields it sets, and its kind
    "url": ("url", SettingType("the address of a server", lambda text: parse_url(text).url)),
    "token_file": ("token_file", SettingType("the path of a file", TEXT.check)),
    "db": ("db", SettingType("the name of a database", real_name)),
    "table": ("table", SettingType("the name of a table", TEXT.check)),
    "tables": ("tables", SettingType("names with commas between, or *", _tables)),
    "columns": ("columns", SettingType("names with commas between, or a JSON list", _names)),
    "where": ("where", SettingType("a condition on the row", TEXT.check)),
    "version": ("generation version", SettingType("an offset, or <generation>.<offset>", _version)),
    "generation": ("generation", SettingType("the generation of a log", TEXT.check)),
    "parts": ("parts", SettingType("JSON [[start, end or null, version], …] with keys in hex", _parts)),
    "ends": ("ends", SettingType("true or false", _flag)),
    "after": ("after", _OFFSET),
    "upto": ("upto", _OFFSET),
    "slices": ("slices", SettingType("JSON [[start, end or null, after, upto], …] with keys in hex", _slices)),
    "shape": ("shape", integer(1)._replace(words="the version of a table's shape")),
    "rowsPerPartition": ("rows_per_partition", integer(1)),
    "rangeBytes": ("range_bytes", integer(1)),
    "startingOffset": ("starting_offset", SettingType("earliest, latest, or the offset after which to begin", _start)),
    "startingTimestamp": (
        "starting_ms",
        SettingType("milliseconds since 1970, or a time such as 2026-01-31T12:00:00Z", _time),
    ),
    "maxRowsPerTrigger": ("max_rows", integer(1)),
    "schemaPolicy": ("policy", SettingType("evolve, pin or fail", _policy)),
    "types": ("types", SettingType("typed or text", _form)),
}
