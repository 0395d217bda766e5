"""Formatting of numbers for people: counts with their noun, and sizes in bytes."""

from __future__ import annotations


def amount(number: int | None) -> str:
    """Return a count with thousands separators; `?` if it is not known."""
    return "?" if number is None else f"{number:,}"


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: `1 table`, `2 tables`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def byte_size(count: int | None) -> str:
    """Return a size in the largest decimal unit up to TB in which it is at least one; `?` if it is not known."""
    if count is None:
        return "?"
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
