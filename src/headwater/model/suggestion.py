"""Hints: what a caller probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint with the name that was probably meant, or all of them when none is close."""
    known = sorted(names)
    close = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.6)
    return f"Did you mean {close[0]!r}?" if close else f"There are: {', '.join(known[:20]) or 'none'}."
