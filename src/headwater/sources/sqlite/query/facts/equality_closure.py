"""Facts that follow from equal columns: a fact about a column holds for every column equal to it."""

from __future__ import annotations

from headwater.model.dependencies.dependency import Const
from headwater.sources.sqlite.query.facts.facts import Atom, Col, Fact, cols, fact_of, moved

MAX_FACTS = 1_000


def closure(facts: list[Fact]) -> list[Fact]:
    """Return `facts` and all that follow from their equalities, which only relate columns of one comparison rule."""
    equals = [fact.equal for fact in facts if fact.equal is not None]
    if not equals:
        return facts
    leader: dict[Col, Col] = {}

    def find(col: Col) -> Col:
        while leader.setdefault(col, col) != col:
            leader[col] = leader[leader[col]]  # path compression: the next search is shorter
            col = leader[col]
        return col

    for one, other in equals:
        leader[find(one)] = find(other)
    classes: dict[Col, list[Col]] = {}
    for col in list(leader):
        classes.setdefault(find(col), []).append(col)
    found = list(facts)
    for fact in facts:
        if fact.formula is None or len(found) > MAX_FACTS:
            continue
        about = set(cols(fact.formula))
        if len(about) != 1 or (col := about.pop()) not in leader:
            continue
        for other in classes[find(col)]:
            if other != col:
                found.append(fact_of(moved(fact.formula, {col: other})))
    return found


def not_null(col: Col) -> Fact:
    """Return the fact that `col` is not NULL."""
    return fact_of(Atom(col, "is_not", (Const(None),)))
