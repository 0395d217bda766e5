"""The columns of a row that stay unchanged in the sink because the source left them out. Pure; see whole_rows.py."""

from __future__ import annotations

import msgspec

UNKNOWN = '{"t":"unavailable"}'  # as in `_misfit`; inside a text the quotes would be escaped


def kept(misfit: str | None) -> tuple[frozenset[str], str | None]:
    """Return the columns that `_misfit` marks as unchanged after `fill_unknown`, and `_misfit` without those marks."""
    if misfit is None or UNKNOWN not in misfit:
        return frozenset(), misfit
    found = msgspec.json.decode(misfit, type=dict[str, msgspec.Raw])
    names = frozenset(name for name, lit in found.items() if bytes(lit) == UNKNOWN.encode())
    rest = {name: lit for name, lit in found.items() if name not in names}
    return names, msgspec.json.encode(rest).decode() if rest else None
