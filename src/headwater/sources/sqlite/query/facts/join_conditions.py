"""Conditions pushed through joins: which side of a join a fact restricts, and where outer joins add NULLs."""

from __future__ import annotations

from headwater.sources.sqlite.query.facts.conditions import Conditions
from headwater.sources.sqlite.query.facts.equality_closure import closure
from headwater.sources.sqlite.query.facts.facts import Fact, Occurrence
from headwater.sources.sqlite.query.facts.name_frame import Frame
from headwater.sources.sqlite.query.syntax import tree


def restrict(
    node: tree.From | None, frame: Frame, conditions: Conditions, facts: list[Fact], given: list[Fact]
) -> None:
    """Add to every source below `node` the conditions on its rows that follow from `facts` about the joined rows.

    `given` holds for the enclosing blocks.
    """
    if node is not None:
        _Join(frame, conditions, given).restrict(node, facts)


class _Join:
    def __init__(self, frame: Frame, conditions: Conditions, given: list[Fact]) -> None:
        self._frame, self._conditions, self._given = frame, conditions, given

    def restrict(self, node: tree.From, facts: list[Fact]) -> None:
        if isinstance(node, tree.Source):
            self._leaf(node, facts)
            return
        left, right = self._occurrences(node.left), self._occurrences(node.right)
        on = self._on(node)
        kind = _simplified(node.kind, facts, left, right)
        if kind == "FULL":
            self.restrict(node.left, [])
            self.restrict(node.right, [])
        elif kind == "":
            known = self._closed(facts + on)
            _link(known, left, right)
            _link(known, right, left)
            self.restrict(node.left, _without(known, right))
            self.restrict(node.right, _without(known, left))
        elif kind == "LEFT":
            self._outer(node.left, node.right, left, right, facts, on)
        else:
            self._outer(node.right, node.left, right, left, facts, on)

    def _outer(
        self,
        kept: tree.From,
        made_up: tree.From,
        theirs: set[Occurrence],
        others: set[Occurrence],
        facts: list[Fact],
        on: list[Fact],
    ) -> None:
        """Restrict an outer join: all rows of `kept` remain, and `made_up` is NULL where no row matches."""
        mine = [fact for fact in facts if fact.about.isdisjoint(others)]
        mine = [Fact(fact.formula, fact.equal, fact.rejects - others) for fact in mine]
        self.restrict(kept, self._closed(mine))
        known = self._closed(mine + on)
        _link(known, others, theirs)
        self.restrict(made_up, _without(known, theirs))

    def _leaf(self, source: tree.Source, facts: list[Fact]) -> None:
        occurrence = self._frame.occurrences[id(source)]
        known = self._closed(facts)
        _link(known, {occurrence}, None)
        formulas = dict.fromkeys(occurrence.formulas)
        for fact in known:
            is_mine = fact.about <= {occurrence}  # also a fact that names no occurrence, as of WHERE 0
            if fact.formula is not None and is_mine:
                formulas[fact.formula] = None
        occurrence.formulas[:] = formulas

    def _on(self, node: tree.Join) -> list[Fact]:
        found = self._conditions.facts(node.on)
        for left, right in node.shared:
            found += self._conditions.facts(tree.Binary("=", left, right))
        return found

    def _closed(self, facts: list[Fact]) -> list[Fact]:
        known = set(facts)
        found = closure(facts + [fact for fact in self._given if fact not in known])
        self._conditions.work.spend(found)
        return found

    def _occurrences(self, node: tree.From) -> set[Occurrence]:
        return {self._frame.occurrences[id(source)] for source in tree.sources(node)}


def _simplified(kind: str, facts: list[Fact], left: set[Occurrence], right: set[Occurrence]) -> str:
    """Return the simplest kind of join that gives the same rows where `facts` hold."""
    rejects: set[Occurrence] = set().union(*(fact.rejects for fact in facts)) if facts else set()
    no_left, no_right = not rejects.isdisjoint(left), not rejects.isdisjoint(right)
    if kind == "FULL":
        return {(True, True): "", (True, False): "LEFT", (False, True): "RIGHT"}.get((no_left, no_right), "FULL")
    if (kind == "LEFT" and no_right) or (kind == "RIGHT" and no_left):
        return ""
    return kind


def _without(facts: list[Fact], others: set[Occurrence]) -> list[Fact]:
    """Return the facts that do not name `others`; of the rest keep only which NULLs they reject."""
    found = []
    for fact in facts:
        if fact.about.isdisjoint(others):
            found.append(fact)
        elif not fact.rejects <= others:
            found.append(Fact(None, None, fact.rejects - others))
    return found


def _link(facts: list[Fact], mine: set[Occurrence], theirs: set[Occurrence] | None) -> None:
    """Record that a row of `mine` needs a row of `theirs` (None: of an enclosing block) with an equal value."""
    links = {occurrence: dict.fromkeys(occurrence.links) for occurrence in mine}
    for fact in facts:
        if fact.equal is None:
            continue
        for own, other in (fact.equal, fact.equal[::-1]):
            is_theirs = other[0] in theirs if theirs is not None else other[0] not in mine
            if own[0] in mine and is_theirs:
                links[own[0]][own[1], other] = None
    for occurrence, found in links.items():
        occurrence.links[:] = found
