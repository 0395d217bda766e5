"""Stored definitions of a file's views: a redefined view changes the results of queries without a row change."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import msgspec

_PLAIN = re.compile(r"[\w$]+")

Texts = Mapping[str, str | None]  # view to its definition; None for a dropped view


def moved(before: Texts, now: Mapping[str, str]) -> list[str]:
    """Return the views that were dropped, re-created or redefined; a new view is in no query yet."""
    return [name for name, text in before.items() if now.get(name) != text]


def remembered(before: Texts, now: Mapping[str, str]) -> dict[str, str | None]:
    """Return the definitions to compare with next time."""
    return {**dict.fromkeys(before, None), **now}


def read_by(name: str, texts: Texts, tables: Collection[str]) -> set[str]:
    """Return the tables that a view may read, directly or through other views: every table its text could name."""
    found: set[str] = set()
    left, seen = [name], {name}
    while left:
        text = (texts.get(left.pop()) or "").lower()
        found |= {table for table in tables if _is_named(table, text)}
        inner = {view for view in texts if view not in seen and _is_named(view, text)}
        seen |= inner
        left += inner
    return found


def _is_named(name: str, text: str) -> bool:
    lowered = name.lower()
    if _PLAIN.fullmatch(lowered):
        return lowered in _PLAIN.findall(text)
    return any(form in text for form in (lowered, *(lowered.replace(mark, mark * 2) for mark in "\"`'")))


def parse(text: str) -> dict[str, str | None]:
    """Return the definitions stored in `text`, as JSON, by view; {} if it is empty."""
    return msgspec.json.decode(text, type=dict[str, str | None]) if text else {}
