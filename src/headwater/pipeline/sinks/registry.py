"""The kinds of sinks by name, and the creation of a sink from its settings; libraries are imported on first use."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from headwater.errors import ConfigError
from headwater.model.suggestion import nearest
from headwater.pipeline.sinks.sink import Sink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Needs(NamedTuple):
    """The context that a sink gets in addition to its settings."""

    name: str  # pipeline, database and table, for output
    spark: SparkSession
    ledger: Any = None  # load() and save(State), for sinks that cannot store their own state


class Kind(NamedTuple):
    """One kind of sink: the function that creates it, its settings and its delivery guarantee."""

    module: str
    function: str  # (settings, Needs) -> Sink
    settings: tuple[str, ...]
    needed: tuple[str, ...]  # the required settings
    exactly_once: bool = True


_DELTA = (
    "path",
    "mode",
    "change_data_feed",
    "checkpoint_every",
    "maintain_every",
    "file_bytes",
    "storage_options",
)
_SQL = ("url", "url_file", "url_env", "table", "schema", "mode", "lock_seconds", "replace")
_KAFKA = ("servers", "topic", "format", "tombstones", "options")

KINDS = {
    "delta": Kind("delta.delta", "open_delta", _DELTA, ("path",)),
    "delta-spark": Kind("delta.delta_spark", "open_delta_spark", _DELTA, ("path",)),
    "parquet": Kind("parquet.parquet", "open_parquet", ("path", "mode"), ("path",)),
    "sql": Kind("sql.sql", "open_sql", _SQL, ("table",)),
    "kafka": Kind("kafka", "open_kafka", _KAFKA, ("servers", "topic"), exactly_once=False),
    "foreach": Kind("foreach", "open_foreach", ("function",), ("function",), exactly_once=False),
}


def is_exactly_once(kind: str) -> bool:
    """Return whether sinks of this kind commit rows and progress together."""
    return _kind(kind).exactly_once


def open_sink(kind: str, settings: dict[str, Any], *, name: str, spark: SparkSession, ledger: Any = None) -> Sink:
    """Return the sink that `settings` describe; raise ConfigError if they are invalid."""
    found = _kind(kind)
    module = import_module(f"headwater.pipeline.sinks.{found.module}")
    make: Callable[[dict[str, Any], Needs], Sink] = getattr(module, found.function)
    return make(settings, Needs(name, spark, ledger))


def _kind(kind: str) -> Kind:
    if kind not in KINDS:
        raise ConfigError(f"there is no sink of kind {kind!r}", hint=nearest(kind, KINDS))
    return KINDS[kind]
