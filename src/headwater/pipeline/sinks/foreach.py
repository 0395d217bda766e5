"""Foreach: a user's function receives every frame, for destinations that have no sink of their own.

The driver calls `function(frame, work, table)`: `work` is the list of Parts whose rows the frame holds (partition i
those of part i), or the Step whose changes the frame holds. At least once: after a crash the function may receive
the last frame again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.errors import ConfigError
from headwater.model.table import Table
from headwater.pipeline.sinks.ledger import Ledger, LedgerSink
from headwater.pipeline.sinks.sink import Part, Step

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headwater.pipeline.sinks.registry import SinkContext

Function = Callable[["DataFrame", Step | list[Part], Table], object]


class ForeachSink(LedgerSink):
    """A sink that calls `function` with rows, then with changes."""

    def __init__(self, name: str, ledger: Ledger, function: Function) -> None:
        super().__init__(name, ledger)
        self._function = function

    def _send_rows(self, frame: DataFrame, parts: Sequence[Part], table: Table) -> None:
        self._function(frame, list(parts), table)

    def _send_changes(self, frame: DataFrame, step: Step, table: Table) -> None:
        self._function(frame, step, table)


def open_foreach(settings: Mapping[str, Any], context: SinkContext) -> ForeachSink:
    """Return a sink from its checked settings: `function`, as "module:name"."""
    path = settings["function"]
    return ForeachSink(f"foreach {path}", context.ledger, find_function(path))


_HOW = 'Set function = "module:name"; it is called as name(frame, step_or_parts, table).'


def find_function(path: str) -> Function:
    """Return the function "module:name"; add the working directory to sys.path. ConfigError if there is none."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError("the foreach sink needs a function", hint=_HOW)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        found = getattr(import_module(module), name, None)
    except ImportError as error:
        raise ConfigError(f"function {path!r} cannot be imported: {error}", hint=_HOW) from None
    if not callable(found):
        raise ConfigError(f"module {module!r} has no function {name!r}", hint=_HOW)
    function: Function = found
    return function
