"""Classes of reasons why answers are not cacheable or queries depend on whole tables, for metrics."""

from __future__ import annotations

import re

import msgspec

from headwater.model.dependencies.dependency import Analysis

CLOCKS = ("date", "time", "datetime", "julianday", "strftime", "unixepoch", "timediff")
NOW = ("current_date", "current_time", "current_timestamp")
VOLATILE = frozenset((*CLOCKS, *NOW, "random", "randomblob", "changes", "total_changes", "last_insert_rowid"))
UNCACHEABLE = (
    "volatile_function",
    "unknown_function",
    "not_captured",
    "rowid",
    "virtual_table",
    "schema_table",
    "other",
)
FALLBACK = ("not_understood", "engine_disagrees", "order_open", "rowid", "too_large")

_FUNCTION = re.compile(r"(\S+)\(\) may answer differently")
_FOREIGN = re.compile(r"'(.*)' is no table whose changes are seen")
_LARGE = re.compile(r"(nested deeper|longer) than |more than \d+ |RecursionError")


class Reasons(msgspec.Struct):
    """Counters by class."""

    uncacheable: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(UNCACHEABLE, 0))  # counts answers
    fallback: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(FALLBACK, 0))  # counts analyses

    def answered(self, found: Analysis) -> None:
        """Count an answer that is not cacheable."""
        self.uncacheable[uncacheable(found)] += 1

    def analysed(self, found: Analysis) -> None:
        """Count an analysis that fell back to whole tables or rows, if it did."""
        if found.is_cacheable and found.doubts:
            self.fallback[fallback(found.doubts[0])] += 1


def uncacheable(found: Analysis) -> str:
    """Return why answers of the query are not cacheable: the first class in the order of UNCACHEABLE."""
    return min((_of_volatile(reason) for reason in found.volatile), key=UNCACHEABLE.index, default="other")


def _of_volatile(reason: str) -> str:
    if (function := _FUNCTION.match(reason)) is not None:
        return "volatile_function" if function[1].lower() in VOLATILE else "unknown_function"
    if (foreign := _FOREIGN.match(reason)) is not None:
        return "schema_table" if foreign[1].lower().startswith("sqlite_") else "virtual_table"
    if reason.startswith("the rowid of "):
        return "rowid"
    return "not_captured" if reason.endswith(" is not captured") else "other"


def fallback(doubt: str) -> str:
    """Return the class of a doubt of an analysis."""
    if doubt.startswith("every column counts: "):
        return "order_open"
    if doubt.startswith("the rowid of "):
        return "rowid"
    if doubt.startswith("SQLite "):
        return "engine_disagrees"
    return "too_large" if _LARGE.search(doubt) else "not_understood"
