"""A pipeline as described by a TOML file, which is checked completely before anything starts.

PIPELINE_KEYS and TABLE_KEYS are made from the dataclasses; reading, the template and the docs follow them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from headwater.config.reader import read_toml, read_values, unknown, wrong
from headwater.config.setting_types import (
    ADDRESS,
    DURATION,
    NAMES,
    TEXT,
    TEXTS,
    SettingType,
    integer,
    need,
    one_of,
    or_none,
    setting,
    text,
)
from headwater.errors import ConfigError
from headwater.model.url_secrets import without_secrets
from headwater.pipeline.sinks.registry import KINDS, read_settings
from headwater.pipeline.spark.options import EVOLVE, POLICIES
from headwater.pipeline.transform.schema import FORMS, TYPED

EXACTLY_ONCE, AT_LEAST_ONCE = "exactly-once", "at-least-once"
META_FILE = "headwater-pipeline.db"
_VARIABLE = re.compile(r"\$\{(\w+)\}", re.ASCII)
_SHOWN = ("path", "url", "topic", "table", "schema", "function", "mode", "servers")  # of a sink; all else may be secret


def _name(value: Any) -> str:
    need(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", text(value), re.ASCII))
    return str(value)


def _server(value: Any) -> str:
    need(re.fullmatch(r"https?://[^/@\s]+/?", text(value)))
    return str(value).rstrip("/")


NAME = SettingType("a name of letters, digits, _ . and -, at most 64", _name)
SERVER = SettingType("a URL like http://127.0.0.1:7171, without a password", _server)


@dataclass(frozen=True)
class SinkSpec:
    """The kind of a sink, and its settings."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict, repr=False)  # may hold a password

    @property
    def shown(self) -> str:
        """Return kind and location for output and the meta store, without secrets."""
        given = {name: self.settings.get(name) for name in _SHOWN}
        return " ".join([self.kind, *(f"{name}={redacted(text)}" for name, text in given.items() if type(text) is str)])


@dataclass(frozen=True)
class TableSpec:
    """One table to carry."""

    table: str
    sink: SinkSpec
    db: str = setting("main", TEXT, "the database, by its name on the server")
    columns: tuple[str, ...] = setting((), NAMES, "columns to carry; none named means all")
    where: str | None = setting(None, or_none(TEXT), "a SQL condition: only rows that meet it are carried")
    schema: str = setting(EVOLVE, one_of(*POLICIES), "what a changed shape of the table means: follow, ignore or stop")
    on_lost: str = setting(
        "resnapshot",
        one_of("resnapshot", "fail"),
        "what to do when the log no longer holds the changes the sink needs",
    )
    types: str = setting(
        TYPED, one_of(*FORMS), "decimals, dates and timestamps of a new sink: in types of their own, or as text"
    )


@dataclass(frozen=True)
class PipelineSpec:
    """A pipeline: its tables, where it reads, and how it runs."""

    tables: tuple[TableSpec, ...]
    name: str = setting(MISSING, NAME, "the pipeline's name in the meta store; needed")
    server: str = setting("http://127.0.0.1:7171", SERVER, "the Headwater server to read from")
    token_file: str | None = setting(
        None, or_none(TEXT), "file with the credential, mode 0600, on every machine that runs executors"
    )
    meta: str = setting(META_FILE, TEXT, "the meta store: a SQLite file, or postgresql://…, mysql://…, mariadb://…")
    master: str = setting("local[*]", TEXT, "Spark's master: local[*], spark://host:7077, yarn, k8s://…")
    guarantee: str = setting(
        EXACTLY_ONCE, one_of(EXACTLY_ONCE, AT_LEAST_ONCE), "what to promise; a sink that cannot refuses to start"
    )
    parallelism: int = setting(4, integer(1), "ranges of one table that are read at the same time")
    range_bytes: int = setting(64 << 20, integer(1), "size of a range of the snapshot, about")
    step_rows: int = setting(200_000, integer(1), "most changes applied in one commit")
    step_bytes: int = setting(256 << 20, integer(1), "most bytes of changes applied in one commit, about")
    lease_seconds: float = setting(
        30.0, DURATION, "how long a table stays taken after its pipeline server died without a word"
    )
    metrics: str | None = setting(None, or_none(ADDRESS), "where Prometheus reads metrics of the run; none: nowhere")
    packages: tuple[str, ...] = setting((), NAMES, "Maven coordinates of jars for Spark to fetch")
    jars: tuple[str, ...] = setting((), NAMES, "jar files for Spark")
    conf: Mapping[str, str] = field(
        default_factory=dict,
        repr=False,
        metadata={"kind": TEXTS, "doc": "settings of Spark, as a table [pipeline.conf]"},
    )


class Key(NamedTuple):
    """One key of a pipeline file."""

    name: str
    kind: SettingType
    default: Any
    doc: str


def _keys(cls: type) -> tuple[Key, ...]:
    found = [each for each in fields(cls) if "kind" in each.metadata]
    return tuple(Key(each.name, each.metadata["kind"], each.default, each.metadata["doc"]) for each in found)


def _table(value: Any) -> dict[str, Any]:
    need(isinstance(value, dict))
    return dict(value)


PIPELINE_KEYS = _keys(PipelineSpec)
TABLE_KEYS = (
    Key("table", TEXT, MISSING, "the table; this or `tables` is needed"),
    Key("tables", NAMES, MISSING, "several tables of one database that go to sinks of one kind"),
    *_keys(TableSpec),
    Key(
        "sink", SettingType("a table with kind and settings", _table), MISSING, "where it goes, as [table.sink]; needed"
    ),
)


# --- reading ---------------------------------------------------------------------------------------------


def read_spec(file: Path, environ: Mapping[str, str] = os.environ) -> PipelineSpec:
    """Return the pipeline that `file` describes; ConfigError if the file cannot be read or is not valid."""
    body = read_toml(file, hint="`headwater pipeline init` writes a first one.")
    return spec_of(body, file.absolute().parent, str(file), environ)


def spec_of(body: Mapping[str, Any], folder: Path, origin: str, environ: Mapping[str, str]) -> PipelineSpec:
    """Return the pipeline of the content of a file; relative paths in it start at `folder`."""
    for name in body:
        if name not in ("pipeline", "table"):
            raise unknown("part of a pipeline", name, ("pipeline", "table"))
    if not isinstance(body.get("pipeline"), dict):
        raise ConfigError(f"{origin} has no [pipeline]", hint=_TEMPLATE_HINT)
    read = _Reader(folder, origin, environ)
    tables = tuple(found for number, each in enumerate(_tables(body, origin), 1) for found in read.table(each, number))
    _check_apart(tables)
    return replace(read.pipeline(body["pipeline"]), tables=tables)


_TEMPLATE_HINT = "`headwater pipeline init` writes one with every key explained."


def _tables(body: Mapping[str, Any], origin: str) -> list[Any]:
    found = body.get("table")
    if not isinstance(found, list) or not found:
        raise ConfigError(f"{origin} names no table to carry", hint="Write [[table]], with two brackets each.")
    return found


class _Reader:
    """Reader that turns parts of a pipeline file into specs; relative paths start at `folder`."""

    def __init__(self, folder: Path, origin: str, environ: Mapping[str, str]) -> None:
        self._folder, self._environ = folder, environ
        self._hint = f"It is set by {origin}."

    def pipeline(self, body: Mapping[str, Any]) -> PipelineSpec:
        found = self._checked("pipeline", body, PIPELINE_KEYS)
        if "name" not in found:
            raise wrong("pipeline.name", NAME, hint=self._hint)
        found["meta"] = self._absolute(found.get("meta", META_FILE))
        found["jars"] = tuple(self._absolute(jar) for jar in found.get("jars", ()))
        if found.get("token_file"):
            found["token_file"] = self._absolute(found["token_file"])
        return PipelineSpec((), **found)

    def table(self, body: Any, number: int) -> Iterator[TableSpec]:
        where = f"table {number}"
        if not isinstance(body, dict):
            raise ConfigError(f"{where} is not a table", hint="Write [[table]].")
        named = body.get("table") or body.get("tables")
        where += f" ({named})" if isinstance(named, str) else ""
        found = self._checked(where, body, TABLE_KEYS)
        sink = self._sink(f"{where}: sink", found.pop("sink", None), body.get("sink"))
        one, several = found.pop("table", None), found.pop("tables", ())
        if (one is None) == (not several):
            raise ConfigError(f"{where}: exactly one of `table` and `tables` is needed", hint=self._hint)
        for name in several or (one,):
            spec = TableSpec(name, sink, **found)
            yield replace(spec, sink=_filled(sink, spec))

    def _sink(self, where: str, body: Any, written: Any) -> SinkSpec:
        if not isinstance(body, dict) or not isinstance(body.get("kind"), str):
            raise ConfigError(f"{where}: a table with `kind` is needed", hint='Write [table.sink] and kind = "delta".')
        if body["kind"] not in KINDS:
            raise unknown(f"kind of {where}", body["kind"], KINDS)
        _check_placeholders(where, written)  # braces in environment variables are no placeholders
        given = {name: value for name, value in body.items() if name != "kind"}
        settings = read_settings(body["kind"], given, where=where, written=written, hint=self._hint)
        if "path" in settings:
            settings["path"] = self._absolute(settings["path"])
        if settings.get("url", "").startswith(_SQLITE):
            settings["url"] = self._absolute(settings["url"])
        return SinkSpec(body["kind"], settings)

    def _checked(self, where: str, body: Mapping[str, Any], keys: Sequence[Key]) -> dict[str, Any]:
        filled = {name: self._filled(value, f"{where}: {name}") for name, value in body.items()}
        return read_values("key", where, {key.name: key.kind for key in keys}, filled, written=body, hint=self._hint)

    def _filled(self, value: Any, where: str) -> Any:
        """Return `value` with every ${NAME} replaced by the environment variable."""
        match value:
            case str():
                return _VARIABLE.sub(lambda found: self._variable(found[1], where), value)
            case list():
                return [self._filled(each, where) for each in value]
            case dict():
                return {name: self._filled(each, where) for name, each in value.items()}
        return value

    def _variable(self, name: str, where: str) -> str:
        if name not in self._environ:
            raise ConfigError(f"{where}: the environment variable {name} is not set", hint=f"export {name}=…")
        return self._environ[name]

    def _absolute(self, text: str) -> str:
        """Return the absolute path of a path relative to the file; URLs stay unchanged."""
        if text.startswith(_SQLITE):
            return _SQLITE + str(self._folder / text.removeprefix(_SQLITE))
        return text if "://" in text else str(self._folder / Path(text).expanduser())


_SQLITE = "sqlite:///"
_PLACEHOLDER = re.compile(r"(?<!\$)\{(\w*)\}")
_PLACEHOLDERS = ("db", "table")
_PLACES = ("path", "table", "schema", "topic")  # checked for unknown placeholders; a password in a URL may hold braces


def _check_placeholders(where: str, body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        for found in _PLACEHOLDER.findall(value) if isinstance(value, str) and name in _PLACES else ():
            if found not in _PLACEHOLDERS:
                known = ", ".join(f"{{{each}}}" for each in _PLACEHOLDERS)
                raise ConfigError(f"{where}: {name}: unknown placeholder {{{found}}}", hint=f"There are: {known}.")


def _filled(sink: SinkSpec, table: TableSpec) -> SinkSpec:
    def fill(value: Any) -> Any:
        return value.replace("{db}", table.db).replace("{table}", table.table) if isinstance(value, str) else value

    return SinkSpec(sink.kind, {name: fill(value) for name, value in sink.settings.items()})


def _check_apart(tables: Iterable[TableSpec]) -> None:
    """Raise ConfigError for a table that is carried twice, and for two tables with one sink location."""
    named: set[tuple[str, str]] = set()
    places: dict[tuple[Any, ...], TableSpec] = {}
    for each in tables:
        if (each.db, each.table) in named:
            raise ConfigError(
                f"table {each.db}.{each.table} is carried twice", hint="Make a second pipeline with a name of its own."
            )
        named.add((each.db, each.table))
        settings = each.sink.settings
        place = tuple(str(settings.get(name, "")) for name in ("path", "url", "table"))
        if (place[0] or place[2]) and places.setdefault(place, each) is not each:
            raise ConfigError(
                f"tables {places[place].table} and {each.table} have the same sink location",
                hint="Write {table} in the `path` or `table` of the sink.",
            )


def redacted(text: str) -> str:
    """Return `text`; of a URL only scheme, host, port and path, or only the scheme if these may hold a password."""
    scheme, mark, rest = text.partition("://")
    if not mark:
        return without_secrets(text)
    try:
        parts = urlsplit(f"//{rest}")
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return f"{scheme}://…"
    if re.search(r"[/?#].*@", rest, re.DOTALL):  # the end of the password is ambiguous
        return f"{scheme}://…"
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    return f"{scheme}://{host}{port}{parts.path.partition(';')[0]}"


TEMPLATE = """\
# A Headwater pipeline: carries tables, first whole and then change by change, into a lake or a database.
#   headwater pipeline run FILE          go on until Ctrl-C; start again at any time, nothing is lost or doubled
#   headwater pipeline run FILE --once   only up to now
#   headwater pipeline verify FILE       compare source and sink
# Paths are relative to this file. ${NAME} in a value is the environment's.

[pipeline]
name = "lake"                           # its name in the meta store
server = "http://127.0.0.1:7171"        # the Headwater server to read from
# token_file = "token"                  # file with the credential, mode 0600; or set HEADWATER_TOKEN
# meta = "headwater-pipeline.db"        # the meta store; several pipeline servers share postgresql://… or mysql://…
# master = "local[*]"                   # Spark's master; spark://host:7077 is a cluster
# guarantee = "exactly-once"            # or "at-least-once", for sinks that cannot (kafka, foreach)
# parallelism = 4                       # ranges of one table that are read at the same time
# range_bytes = 67108864                # size of a range of the snapshot, about
# step_rows = 200000                    # most changes applied in one commit
# step_bytes = 268435456                # most bytes of changes applied in one commit, about
# lease_seconds = 30                    # how long a table stays taken after its pipeline server died
# metrics = "127.0.0.1:9109"            # where Prometheus reads metrics of the run
# packages = []                         # Maven coordinates of jars for Spark to fetch
# jars = []                             # jar files for Spark

# [pipeline.conf]                       # settings of Spark
# "spark.driver.memory" = "2g"

[[table]]
table = "orders"                        # or tables = ["orders", "customers"], with {table} in the path below
# db = "main"                           # the database, by its name on the server
# columns = ["id", "total"]             # only these; the key is always carried
# where = "total > 0"                   # only rows that meet it
# schema = "evolve"                     # a changed shape: evolve (follow), pin (ignore), fail (stop)
# on_lost = "resnapshot"                # the log lost changes the sink needs: resnapshot, or fail
# types = "typed"                       # of a new sink: decimals, dates, timestamps as such, or "text" for strings

[table.sink]
kind = "delta"                          # delta, delta-spark, parquet, sql, kafka, foreach
path = "lake/{table}"                   # {db} and {table} are those of the table
"""
