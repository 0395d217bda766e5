"""The kinds of sinks by name, and the creation of a sink from its settings; libraries are imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from headwater.config.reader import read_values
from headwater.config.setting_types import FLAG, TEXT, TEXTS, integer, one_of
from headwater.config.setting_types import SettingType as SettingKind
from headwater.errors import ConfigError
from headwater.model.suggestion import nearest
from headwater.pipeline.sinks.sink import FORMATS, MODES, Sink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SinkContext(NamedTuple):
    """The values that a sink gets in addition to its settings."""

    name: str  # pipeline, database and table, for output
    spark: SparkSession
    ledger: Any = None  # load() and save(State), for sinks that cannot store their own state


class SinkKind(NamedTuple):
    """One kind of sink: the function that creates it, its settings and its delivery guarantee."""

    module: str
    function: str  # (checked settings, SinkContext) -> Sink
    settings: dict[str, SettingKind]
    needed: tuple[str, ...]  # the required settings
    exactly_once: bool = True


_MODE = one_of(*MODES)
_PARQUET = {"path": TEXT, "mode": _MODE}
_DELTA = {
    **_PARQUET,
    "change_data_feed": FLAG,
    "checkpoint_every": integer(1),
    "maintain_every": integer(0),
    "file_bytes": integer(1),
    "storage_options": TEXTS,
}
_SQL = {
    **dict.fromkeys(("url", "url_file", "url_env", "table", "schema"), TEXT),
    "mode": _MODE,
    "lock_seconds": integer(0),
    "replace": FLAG,
}
_KAFKA = {"servers": TEXT, "topic": TEXT, "format": one_of(*FORMATS), "tombstones": FLAG, "options": TEXTS}

KINDS = {
    "delta": SinkKind("delta.delta", "open_delta", _DELTA, ("path",)),
    "delta-spark": SinkKind("delta.delta_spark", "open_delta_spark", _DELTA, ("path",)),
    "parquet": SinkKind("parquet.parquet", "open_parquet", _PARQUET, ("path",)),
    "sql": SinkKind("sql.sql", "open_sql", _SQL, ("table",)),
    "kafka": SinkKind("kafka", "open_kafka", _KAFKA, ("servers", "topic"), exactly_once=False),
    "foreach": SinkKind("foreach", "open_foreach", {"function": TEXT}, ("function",), exactly_once=False),
}


def is_exactly_once(kind: str) -> bool:
    """Return whether sinks of this kind commit rows and progress together."""
    return _kind(kind).exactly_once


def read_settings(
    kind: str,
    body: Mapping[str, Any],
    *,
    where: str = "",
    written: Mapping[str, Any] | None = None,
    hint: str = "",
) -> dict[str, Any]:
    """Return the checked settings of a sink; ConfigError, whose message names `where`, if they are invalid."""
    found, where = _kind(kind), where or f"{kind} sink"
    settings = read_values("setting", where, found.settings, body, written=written, hint=hint)
    for name in found.needed:
        if name not in body:
            raise ConfigError(f"{where}: `{name}` is needed", hint=f"Settings: {', '.join(found.settings)}.")
    return settings


def open_sink(kind: str, settings: dict[str, Any], *, name: str, spark: SparkSession, ledger: Any = None) -> Sink:
    """Return the sink that `settings` describe; raise ConfigError if they are invalid."""
    found = _kind(kind)
    module = import_module(f"headwater.pipeline.sinks.{found.module}")
    make: Callable[[dict[str, Any], SinkContext], Sink] = getattr(module, found.function)
    return make(read_settings(kind, settings), SinkContext(name, spark, ledger))


def _kind(kind: str) -> SinkKind:
    if kind not in KINDS:
        raise ConfigError(f"there is no sink of kind {kind!r}", hint=nearest(kind, KINDS))
    return KINDS[kind]
