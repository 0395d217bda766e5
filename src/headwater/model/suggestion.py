"""Suggestions of similar names for error hints."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint with the most similar name, or with the first names if none is similar."""
    known = sorted(names)
    close = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.6)
    return f"Did you mean {close[0]!r}?" if close else f"There are: {', '.join(known[:20]) or 'none'}."
