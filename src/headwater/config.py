"""Settings: one frozen dataclass per room, read once from flags, environment and a TOML file, in that order.

SETTINGS is the table of all of them, made from the dataclasses; loading, `headwater` and the docs follow it.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from headwater.errors import ConfigError

PREFIX = "HEADWATER_"


class Secret(str):
    """Text that never shows itself; `encode()` gives the real bytes to whoever compares them."""

    def __repr__(self) -> str:
        return "'***'"

    def __str__(self) -> str:
        return "***"

    def __format__(self, spec: str) -> str:
        return format("***", spec)


# --- kinds: what a setting may hold ----------------------------------------------------------------------


class Kind(NamedTuple):
    """`check` returns the value to use or raises ValueError; `parse` makes one from environment text."""

    words: str
    check: Callable[[Any], Any]
    parse: Callable[[str], Any] = str


def _need(holds: object) -> None:
    if not holds:
        raise ValueError


def _integer(low: int) -> Kind:
    def check(value: Any) -> int:
        _need(type(value) is int and low <= value < 2**63)
        return int(value)

    return Kind(f"an integer from {low}", check, int)


def _seconds(value: Any) -> float:
    _need(type(value) in (int, float) and math.isfinite(value) and value > 0)
    return float(value)


_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "": 1}
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ms|s|m|h|d|)", re.ASCII)


def _duration(value: Any) -> float:
    if not isinstance(value, str):
        return _seconds(value)
    found = _DURATION.fullmatch(value.strip())
    if not found:
        raise ValueError
    return _seconds(float(found[1]) * _UNITS[found[2]])


def _text(value: Any) -> str:
    _need(type(value) is str and value)
    return str(value)


def _address(value: Any) -> str:
    host, _, port = _text(value).rpartition(":")
    _need(host and re.fullmatch(r"\d{1,5}", port, re.ASCII) and int(port) < 65536)
    return str(value)


def _flag(value: Any) -> bool:
    _need(type(value) is bool)
    return bool(value)


def _flag_text(text: str) -> bool:
    words = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }
    _need(text.lower() in words)
    return words[text.lower()]


def _names(value: Any) -> tuple[str, ...]:
    _need(isinstance(value, (list, tuple)))
    return tuple(_text(name) for name in value)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _databases(value: Any) -> tuple[DatabaseConfig, ...]:
    _need(isinstance(value, Mapping))
    for name in value:
        # The name is part of file names and URLs; `default` is an alias of `main`.
        _need(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]{0,62}", name, re.ASCII) and name != "default")
    return tuple(_database(name, found) for name, found in value.items())


def _database(name: str, found: Any) -> DatabaseConfig:
    """`name = "file"`, or a table with `url` and retention limits of its own."""
    if not isinstance(found, Mapping):
        return DatabaseConfig(name, _text(found))
    limits = {each.name: each.metadata["kind"] for each in fields(LogConfig) if each.name.startswith("retention_")}
    own = {key: value for key, value in found.items() if key != "url"}
    for key, value in own.items():
        if key not in limits:
            raise _unknown(f"setting of database {name}", key, ["url", *limits])
        own[key] = limits[key].check(value)
    return DatabaseConfig(name, _text(found.get("url")), tuple(own.items()))


def _pairs(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in _split(text))


def _one_of(*choices: str) -> Kind:
    def check(value: Any) -> str:
        _need(value in choices)
        return str(value)

    return Kind(f"one of {', '.join(choices)}", check)


def _or_none(kind: Kind) -> Kind:
    def check(value: Any) -> Any:
        return None if value is None or value == "none" else kind.check(value)

    return Kind(f"{kind.words}, or none", check, lambda text: None if text == "none" else kind.parse(text))


ADDRESS = Kind("an address like 127.0.0.1:7171", _address)
DURATION = Kind("a time like 7d, 12h, 30m, 10s, 500ms or a number of seconds", _duration)
SECONDS = Kind("a number of seconds above 0", _seconds, float)
FLAG = Kind("true or false", _flag, _flag_text)
TEXT = Kind("a text", _text)
NAMES = Kind("a list of names", _names, _split)
SECRET = Kind("a text", lambda value: Secret(_text(value)))
DATABASES = Kind(
    "a table of name = path (or a table with url and retention_*), names of letters, digits, _ and -",
    _databases,
    _pairs,
)


def _setting(default: Any, kind: Kind, doc: str, *environment: str) -> Any:
    return field(default=default, metadata={"kind": kind, "doc": doc, "environment": environment})


# --- the rooms -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServeConfig:
    """The wire."""

    http: str = _setting("127.0.0.1:7171", ADDRESS, "where HTTP listens", "HEADWATER_HTTP")
    grpc: str = _setting("127.0.0.1:7172", ADDRESS, "where gRPC listens", "HEADWATER_GRPC")
    token: Secret | None = _setting(
        None, SECRET, "the admin credential; setting it locks every route", "HEADWATER_TOKEN", "SKEINDB_TOKEN"
    )
    auth: bool = _setting(False, FLAG, "demand a credential also on loopback")
    max_body_bytes: int = _setting(16 << 20, _integer(1024), "largest request body")
    drain_seconds: float = _setting(10.0, SECONDS, "how long a stop waits for open requests")
    metrics_open: bool = _setting(False, FLAG, "serve /metrics without a credential")


@dataclass(frozen=True)
class LogConfig:
    """The durable log of each database. The strictest retention limit that is set wins."""

    retention_events: int | None = _setting(
        1_000_000,
        _or_none(_integer(1)),
        "changes kept",
        "HEADWATER_CDC_RETENTION_EVENTS",
        "SKEINDB_CDC_RETENTION_EVENTS",
    )
    retention_bytes: int | None = _setting(None, _or_none(_integer(1)), "bytes of changes kept")
    retention_age: float | None = _setting(None, _or_none(DURATION), "how long changes are kept")
    flush_ms: int = _setting(50, _integer(0), "longest wait for more changes before a block is written")


@dataclass(frozen=True)
class SqliteConfig:
    """The SQLite source."""

    wal: bool = _setting(False, FLAG, "allow turning a file into WAL mode")
    foreign_keys: bool = _setting(True, FLAG, "enforce foreign keys on writes through the server")
    tables: tuple[str, ...] = _setting((), NAMES, "tables to capture; none named means all")
    tx_seconds: float = _setting(2.0, SECONDS, "longest an interactive transaction may hold the writer")
    tx_idle_seconds: float = _setting(0.5, SECONDS, "longest it may hold the writer without a statement")
    statement_seconds: float = _setting(30.0, SECONDS, "longest one statement of a caller may run")
    trim_rows: int = _setting(10_000, _integer(1), "moved changes that make a trim of the capture table due")
    trim_seconds: float = _setting(1.0, SECONDS, "time that makes a trim of the capture table due")
    poll_seconds: float = _setting(0.05, SECONDS, "look for foreign commits this often without inotify")
    on_discontinuity: str = _setting(
        "new_generation", _one_of("new_generation", "stop"), "what to do about a restored or swapped file"
    )


@dataclass(frozen=True)
class DatabaseConfig:
    """One database to serve: its name on the wire and where it is."""

    name: str
    url: str
    retention: tuple[tuple[str, Any], ...] = ()  # limits that differ from those of [log]


@dataclass(frozen=True)
class Config:
    """Everything, by room."""

    data: str = _setting("./headwater-data", TEXT, "directory of our own files", "HEADWATER_DATA")
    databases: tuple[DatabaseConfig, ...] = _setting(
        (), DATABASES, "databases by name; none means `main` in the data directory", "HEADWATER_DATABASES"
    )
    serve: ServeConfig = ServeConfig()
    log: LogConfig = LogConfig()
    sqlite: SqliteConfig = SqliteConfig()

    def log_of(self, database: DatabaseConfig) -> LogConfig:
        """The log settings of one database."""
        return replace(self.log, **dict(database.retention))


ROOMS: dict[str, type] = {"serve": ServeConfig, "log": LogConfig, "sqlite": SqliteConfig}


@dataclass(frozen=True)
class Setting:
    """One line of the table of settings."""

    name: str  # as in the file, with its room: log.retention_age
    room: str
    kind: Kind
    default: Any
    environment: tuple[str, ...]  # the first that is set wins; aliases of other systems come last
    doc: str

    @property
    def type(self) -> str:
        """What it may hold, in words."""
        return self.kind.words

    @property
    def secret(self) -> bool:
        """Whether it must not be printed nor given by a flag."""
        return self.kind is SECRET


def _friendliest(name: str) -> tuple[bool, int, str]:
    return not name.startswith(PREFIX), len(name), name


def _settings(room: str, cls: type) -> Iterable[Setting]:
    for each in fields(cls):
        if "kind" in each.metadata:
            name = f"{room}.{each.name}" if room else each.name
            own = PREFIX + name.replace(".", "_").upper()
            environment = sorted({own, *each.metadata["environment"]}, key=_friendliest)
            yield Setting(name, room, each.metadata["kind"], each.default, tuple(environment), each.metadata["doc"])


SETTINGS: tuple[Setting, ...] = (
    *_settings("", Config),
    *(setting for room, cls in ROOMS.items() for setting in _settings(room, cls)),
)
_BY_NAME = {setting.name: setting for setting in SETTINGS}


# --- loading ---------------------------------------------------------------------------------------------


def load(*, file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Config:
    """The settings: flags (`serve.http`; None means not given) over environment over `file` over defaults."""
    values = _from_file(file) | _from_environment(environ) | _from_flags(flags)
    rooms = {
        room: cls(**{name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{room}.")})
        for room, cls in ROOMS.items()
    }
    return Config(**{name: value for name, value in values.items() if "." not in name}, **rooms)


def _unknown(what: str, name: str, known: Iterable[str]) -> ConfigError:
    (nearest,) = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return ConfigError(f"unknown {what} {name!r}", hint=f"Did you mean {nearest}?")


def _checked(setting: Setting, value: Any, origin: str) -> Any:
    try:
        return setting.kind.check(value)
    except (ValueError, TypeError):
        raise _wrong(setting, value, origin) from None


def _wrong(setting: Setting, value: Any, origin: str) -> ConfigError:
    shown = "" if setting.kind in (SECRET, DATABASES) else f", not {value!r}"  # a URL may hold a password
    return ConfigError(f"{setting.name}: {setting.type} was expected{shown}", hint=f"It is set by {origin}.")


def _from_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        body = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"{file} is not TOML: {error}") from None
    flat: dict[str, Any] = {}
    for name, value in body.items():
        if name not in ROOMS:
            flat[name] = value
        elif isinstance(value, dict):
            flat |= {f"{name}.{inner}": found for inner, found in value.items()}
        else:
            raise ConfigError(f"{name}: a table was expected, not {value!r}", hint=f"Write [{name}].")
    return _known(flat, "setting", str(file))


def _known(flat: Mapping[str, Any], what: str, origin: str) -> dict[str, Any]:
    for name in flat:
        if name not in _BY_NAME:
            raise _unknown(what, name, [*_BY_NAME, *ROOMS])
    return {name: _checked(_BY_NAME[name], value, origin) for name, value in flat.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    known = [name for setting in SETTINGS for name in setting.environment]
    for name in environ:
        if name.startswith(PREFIX) and name not in known:
            raise _unknown("environment variable", name, known)
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        for name in setting.environment:
            if environ.get(name) and setting.name not in values:
                values[setting.name] = _from_text(setting, environ[name], name)
    return values


def _from_text(setting: Setting, text: str, origin: str) -> Any:
    try:
        return setting.kind.check(setting.kind.parse(text))
    except (ValueError, TypeError):
        raise _wrong(setting, text, origin) from None


def _from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in flags.items() if value is not None}
    for name in given:
        if name in _BY_NAME and _BY_NAME[name].secret:
            better = _BY_NAME[name].environment[0]
            raise ConfigError(
                f"{name} is a secret and cannot be a flag",
                hint=f"Other users see flags: set {better} instead.",
            )
    return _known(given, "flag", "a flag")
