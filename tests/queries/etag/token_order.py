"""The order of causality tokens, as the documentation says: the merge of tokens, and which token dominates another."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headwater.queries.etag.causality import FORMAT, WHOLE, Dep, Token


def merge(*tokens: Token) -> Token:
    """Return the token of a reader that has seen all of `tokens`: the highest offset of each table."""
    most: dict[tuple[str, bool], Dep] = {}
    for dep in _each(tokens):
        known = most.get(dep.key)
        if known is None or _newer(dep, known):
            most[dep.key] = msgspec.structs.replace(dep, table=dep.key[0])
    return Token(FORMAT, tuple(most[key] for key in sorted(most)))


def _each(tokens: Iterable[Token]) -> Iterable[Dep]:
    return (dep for found in tokens for dep in found.deps)


def _newer(dep: Dep, known: Dep) -> bool:
    """Return whether `dep` replaces `known`; at equal offsets a stale view wins, so that the order does not matter."""
    return (dep.seen, bool(dep.stale), dep.stale is None) > (known.seen, bool(known.stale), known.stale is None)


def dominates(a: Token, b: Token) -> bool:
    """Return whether the holder of `a` has seen every change that `b` names."""
    seen: dict[tuple[str, bool], int] = {}
    for dep in a.deps:
        seen[dep.key] = max(dep.seen, seen.get(dep.key, 0))
    return all(max(seen.get(dep.key, -1), seen.get(_whole_of(dep), -1)) >= dep.seen for dep in b.deps)


def _whole_of(dep: Dep) -> tuple[str, bool]:
    return f"{dep.key[0].partition('.')[0]}.{WHOLE}", bool(dep.view)
