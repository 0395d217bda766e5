"""Which columns of a row stay as they are in the sink: the source left them out. Pure; see pipeline/whole."""

from __future__ import annotations

import msgspec

UNKNOWN = '{"t":"unavailable"}'  # as `_misfit` has it; in a text its quotes would be escaped


def kept(misfit: str | None) -> tuple[frozenset[str], str | None]:
    """The columns that stay as they are, by what `_misfit` says after `fill_unknown`; and the rest of it."""
    if misfit is None or UNKNOWN not in misfit:
        return frozenset(), misfit
    found = msgspec.json.decode(misfit, type=dict[str, msgspec.Raw])
    names = frozenset(name for name, lit in found.items() if bytes(lit) == UNKNOWN.encode())
    rest = {name: lit for name, lit in found.items() if name not in names}
    return names, msgspec.json.encode(rest).decode() if rest else None
