"""Pushdown of necessary conditions from the top of a query to each occurrence of a table.

For each query the caller knows which columns are needed and which conditions its relevant rows satisfy; these pass
down through SELECT, joins, queries in FROM, WITH names, views, set operations and subqueries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from headwater.sources.sqlite.query.facts.conditions import Conditions, conjuncts
from headwater.sources.sqlite.query.facts.equality_closure import closure
from headwater.sources.sqlite.query.facts.facts import (
    Col,
    Fact,
    Formula,
    Occurrence,
    WorkLimit,
    cols,
    fact_of,
    moved,
    output_kind,
    rule_of,
)
from headwater.sources.sqlite.query.facts.join_conditions import restrict
from headwater.sources.sqlite.query.facts.name_frame import Frame
from headwater.sources.sqlite.query.facts.select_kind import SelectKind, by_number
from headwater.sources.sqlite.query.syntax import tree
from headwater.sources.sqlite.query.syntax.lexer import NotAnalysed

MAX_OCCURRENCES = 200
MAX_BLOCKS = 1_000


class Requirements(msgspec.Struct, eq=False):
    """Requirements on a query from outside: its needed columns (None: all), and conditions on its relevant rows."""

    needed: set[int] | None = None
    target: Occurrence | None = None  # the occurrence whose columns, by position, `formulas` name
    formulas: list[Formula] = []
    given: list[Fact] = []  # facts of the enclosing blocks
    outer: Frame | None = None
    links: list[tuple[str | int, Col]] = []  # own column, and the column it must equal


class Pushdown:
    """Pushdown for one statement. `occurrences` lists the occurrences of tables in the order of traversal."""

    def __init__(self, parameters: tuple[str, ...], real: Callable[[str], float]) -> None:
        self._parameters, self._real = parameters, real
        self.occurrences: list[Occurrence] = []
        self.top: Frame | None = None  # frame of the first block
        self._blocks = 0
        self._work = WorkLimit()

    def query(self, query: tree.Query, asked: Requirements) -> None:
        """Push the requirements `asked` down through one query."""
        formulas, needed = asked.formulas, asked.needed
        if query.is_recursive or query.limit is not None:
            formulas = []
        if query.is_recursive or any(op != "UNION ALL" for op in query.ops):
            needed = None
        if len(query.selects) > 1:
            plain = all(op == "UNION ALL" for op in query.ops)
            formulas = [f for f in formulas if all(_fits(query, place, plain) for _, place in cols(f))]
        if query.is_recursive or query.limit is not None or len(query.selects) > 1:
            links: list[tuple[str | int, Col]] = []
        else:
            links = asked.target.links if asked.target is not None and asked.target.node is None else []
        for select in query.selects:
            order = [] if len(query.selects) > 1 else query.order
            self._select(select, order, Requirements(needed, asked.target, formulas, asked.given, asked.outer, links))
        for part in (query.limit, query.offset):
            if part is not None:
                self._subqueries([part], Frame({}, None), [])

    # --- one SELECT ------------------------------------------------------------------------------------------

    def _select(self, select: tree.Select, order: list[tree.Term], asked: Requirements) -> None:
        self._blocks += 1
        if self._blocks > MAX_BLOCKS:
            raise NotAnalysed(f"more than {MAX_BLOCKS} nested queries")
        frame = Frame({id(source): Occurrence(source) for source in tree.sources(select.source)}, asked.outer)
        if self.top is None:
            self.top = frame
        conditions = Conditions(frame.find, self._parameters, self._real, self._work)
        nature = SelectKind(select, order)
        outputs = _needed(select, nature, asked.needed)
        self._mark(select, order, outputs, frame)
        facts = conditions.facts(select.where)
        facts += [fact_of(f) for f in _translated(select, nature, frame, asked)]
        facts += [fact for fact in conditions.facts(select.having) if _is_of_keys(fact, nature, frame)]
        _take_links(select, nature, frame, asked)
        restrict(select.source, frame, conditions, facts, asked.given)
        inner = list(_inner_joins(select.source))
        # The ON clauses of inner joins hold for every joined row.
        known = closure(facts + [fact for join in inner for fact in conditions.facts(join.on)] + asked.given)
        self._work.spend(known)
        for join in tree.joins(select.source):
            # In an outer join a pair that WHERE rejects still matters: the pair prevents a row of NULLs.
            ons = [join.on] if join.on is not None else []
            self._subqueries(ons, frame, known if join in inner else asked.given, must_hold=True)
        self._subqueries([select.where] if select.where is not None else [], frame, known, must_hold=True)
        rest = [*outputs, *(output for row in select.values or () for output in row)]
        rest += [part for part in (select.having, *select.group) if part is not None]
        rest += [term.of for term in order if term.output is None]
        rest += [part for _, window in select.windows for part in tree.inside(window)]
        rest += [arg for source in tree.sources(select.source) for arg in source.args or ()]
        self._subqueries(rest, frame, asked.given if nature.is_one_row else known)
        for occurrence in frame.occurrences.values():
            self._leaf(occurrence, asked)

    def _mark(self, select: tree.Select, order: list[tree.Term], outputs: list[Any], frame: Frame) -> None:
        """Record every column of this block's sources that is needed, at any depth."""
        kept = tree.Select([tree.Output(of, None) for of in outputs], values=select.values)
        kept.source, kept.where, kept.group = select.source, select.where, select.group
        kept.having, kept.windows = select.having, select.windows
        parts: list[Any] = [*tree.of_select(kept), *(term.of for term in order if term.output is None)]
        parts += [select.outputs[term.output].of for term in order if term.output is not None]
        parts += [by_number(key, select) for key in select.group]
        for join in tree.joins(select.source):
            parts += [ref for pair in join.shared for ref in pair]
        for part in parts:
            for ref in tree.names_in(part):
                if (occurrence := frame.own(ref)) is not None:
                    occurrence.used.add(ref.column)

    def _leaf(self, occurrence: Occurrence, asked: Requirements) -> None:
        node = occurrence.node
        assert node is not None
        if node.table is not None:
            occurrence.number = len(self.occurrences)
            self.occurrences.append(occurrence)
            if len(self.occurrences) > MAX_OCCURRENCES:
                raise NotAnalysed(f"tables are used in more than {MAX_OCCURRENCES} places")
        elif node.kind in ("query", "view", "with") and node.query is not None:
            needed = {int(column) for column in occurrence.used}
            outer = asked.outer if node.kind == "query" else None
            given = asked.given if node.kind == "query" else []
            self.query(node.query, Requirements(needed, occurrence, occurrence.formulas, given, outer))

    # --- subqueries ------------------------------------------------------------------------------------------

    def _subqueries(self, roots: Iterable[Any], frame: Frame, known: list[Fact], must_hold: bool = False) -> None:
        seen: set[int] = set()
        for root in roots:
            for part in conjuncts(root) if must_hold else ():
                if isinstance(part, tree.In) and part.query is not None and not part.negated:
                    seen.add(id(part.query))
                    self._listed(part, part.query, frame, known)
            for node in tree.below(root):
                if isinstance(node, tree.Subquery) and id(node.query) not in seen:
                    seen.add(id(node.query))
                    self.query(node.query, Requirements(set() if node.exists else None, given=known, outer=frame))
                elif isinstance(node, tree.Query) and id(node) not in seen:
                    seen.add(id(node))
                    self.query(node, Requirements(None, given=known, outer=frame))

    def _listed(self, part: tree.In, query: tree.Query, frame: Frame, known: list[Fact]) -> None:
        """Push the conditions on x into the query of a required x IN (SELECT y …): other rows of it are irrelevant."""
        target = Occurrence(None)
        formulas: list[Formula] = []
        of, kind = part.of, output_kind(query, 0)
        mine = rule_of(of) if isinstance(of, tree.Ref) and not query.is_recursive else None
        if isinstance(of, tree.Ref) and mine is not None and kind is not None and mine.rule == kind.rule:
            occurrence = frame.find(of)
            col: Col | None = None if occurrence is None else (occurrence, of.column)
            if col is not None:
                about = [f.formula for f in known if f.formula is not None and set(cols(f.formula)) == {col}]
                formulas = [moved(formula, {col: (target, 0)}) for formula in about]
                target.links.append((0, col))
        self.query(query, Requirements(None, target, formulas, known, frame))


def _needed(select: tree.Select, nature: SelectKind, needed: set[int] | None) -> list[Any]:
    outputs = [output.of for output in select.outputs]
    if select.values is not None:
        return []
    return outputs if needed is None or nature.keeps_all else [outputs[place] for place in sorted(needed)]


def _fits(query: tree.Query, place: str | int, plain: bool) -> bool:
    kind = output_kind(query, int(place))
    return kind is not None and (plain or kind[1] == "BINARY")


def _translated(select: tree.Select, nature: SelectKind, frame: Frame, asked: Requirements) -> Iterable[Formula]:
    """Yield the conditions on the outputs as conditions on the columns behind these outputs."""
    if asked.target is None or select.values is not None:
        return
    for formula in asked.formulas:
        to: dict[Col, Col] = {}
        for col in cols(formula):
            of = select.outputs[int(col[1])].of
            occurrence = frame.own(of) if isinstance(of, tree.Ref) else None
            if occurrence is not None and nature.lets_through(of):
                to[col] = (occurrence, of.column)
        if len(to) == len(set(cols(formula))):
            yield moved(formula, to)


def _take_links(select: tree.Select, nature: SelectKind, frame: Frame, asked: Requirements) -> None:
    for place, col in asked.links:
        of = select.outputs[int(place)].of
        occurrence = frame.own(of) if isinstance(of, tree.Ref) else None
        if occurrence is not None and nature.lets_through(of):
            occurrence.links.append((of.column, col))


def _is_of_keys(fact: Fact, nature: SelectKind, frame: Frame) -> bool:
    """Return whether a HAVING condition concerns only the group keys, and so holds for every row of a group."""
    if fact.formula is None or fact.equal is not None or not nature.is_grouped or nature.has_windows:
        return False
    keys = {
        (frame.own(key), key.column)
        for key in nature.keys
        if isinstance(key, tree.Ref) and (kind := rule_of(key)) is not None and kind[1] == "BINARY"
    }
    return all(col in keys for col in cols(fact.formula))


def _inner_joins(node: tree.From | None) -> Iterator[tree.Join]:
    """Yield the joins whose ON holds for every joined row."""
    if isinstance(node, tree.Join) and not node.kind:
        yield node
        yield from _inner_joins(node.left)
        yield from _inner_joins(node.right)
