"""Determinism of answers: whether two runs over equal rows give equal answers in equal order. Pure.

If the plan decides which rows or values an answer has, the answer cannot be cached. If the plan decides only their
order, or which of two equal values is shown (1.0 or 1.00), the tag is weak.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import msgspec

from headwater.sources.postgres import types
from headwater.sources.postgres.query.analysis.immutable_functions import FIRST_OWN
from headwater.sources.postgres.query.analysis.parse_tree import Item, Node, below
from headwater.sources.postgres.query.analysis.row_conditions import INNER, bare, conjuncts
from headwater.sources.postgres.query.analysis.tree_reads import RELATION, type_of

LEFT, _UNION = "1", "1"
_ARRAY_SUBLINK, _EXISTS = "6", "0"
# Equal values of these types are identical; for text only if the collation is deterministic.
_TEXTS = frozenset({types.TEXT, types.VARCHAR, 19})
_EXACT = _TEXTS | {types.BOOL, types.BYTEA, types.INT2, types.INT4, types.INT8, types.OID, types.UUID_}
_EXACT |= {types.DATE, types.TIME, types.TIMETZ, types.TIMESTAMP, types.TIMESTAMPTZ}
_IN_ORDER = frozenset({"array_agg", "string_agg", "json_agg", "jsonb_agg", "json_object_agg", "jsonb_object_agg"})
_IN_ORDER |= {f"{name}_{more}" for name in ("json_agg", "jsonb_agg") for more in ("strict",)} | {"xmlagg", "mode"}
_IN_ORDER |= {"json_object_agg_strict", "jsonb_object_agg_strict", "any_value"}
_IN_ORDER |= {"json_object_agg_unique", "json_object_agg_unique_strict"}
_CHOOSING = frozenset({"min", "max", "percentile_disc", "percentile_cont", "range_agg", "range_intersect_agg"})
_BY_PLACE = frozenset({"row_number", "ntile", "lag", "lead", "first_value", "last_value", "nth_value"})
_BY_PEERS = frozenset({"rank", "dense_rank", "percent_rank", "cume_dist"})
_ROUNDED = frozenset({"sum", "avg", "corr", "covar_pop", "covar_samp", "variance", "stddev", "var_pop", "var_samp"})
_ROUNDED |= {"stddev_pop", "stddev_samp"}
_FLOATS = frozenset({700, 701})
_MERGING = ("setOperations", "distinctClause", "groupClause", "groupingSets", "havingQual")
NO_ORDER = "the order of its rows is not determined: add a key to ORDER BY"
Cell = tuple[int, int]  # number of a table in FROM, number of a column


class CatalogFacts(msgspec.Struct, frozen=True):
    """The catalogue's facts by oid: keys of tables, names of functions, PostgreSQL's own `=` operators, and the
    collations that treat different texts as equal."""

    keys: Mapping[int, tuple[int, ...]]
    functions: Mapping[int, str]
    equals: frozenset[int]
    odd: frozenset[int]


class OrderVerdict(msgspec.Struct, frozen=True):
    """The verdict: `reasons` why an answer cannot be cached; `doubts` why its tag is weak."""

    reasons: tuple[str, ...]
    doubts: tuple[str, ...]


def judge(trees: list[Node], known: CatalogFacts) -> OrderVerdict:
    """Return the verdict on a statement, which is the first tree, and the rules of its views."""
    reasons: set[str] = set()
    doubts: set[str] = set()
    for tree in trees:
        links = [node for node in below(tree) if node.tag == "SUBLINK"]
        exists = {id(node["subselect"]) for node in links if node["subLinkType"] == _EXISTS}
        for query in [node for node in below(tree) if node.tag == "QUERY"]:
            reasons.update(_QueryLevel(query, known).reasons(is_asked=id(query) not in exists))
            doubts.update(_QueryLevel(query, known).doubts())
        for link in links:
            if link["subLinkType"] == _ARRAY_SUBLINK and not _QueryLevel(link["subselect"], known).is_total():
                reasons.add("ARRAY(SELECT …) without a total order: add a key to its ORDER BY")
    if not _QueryLevel(trees[0], known).is_total():
        doubts.add(NO_ORDER)
    return OrderVerdict(tuple(sorted(reasons)), tuple(sorted(doubts)))


class _QueryLevel:
    """The order of one QUERY node of a parse tree."""

    def __init__(self, query: Node, known: CatalogFacts) -> None:
        self._query, self._known = query, known
        self._targets = {entry.number("ressortgroupref"): entry for entry in query.items("targetList")}
        self._entries = query.items("rtable")

    def _sorted(self, clauses: list[Node]) -> list[Item]:
        """Return the expressions of a sort or group clause."""
        return [self._seen_through(self._targets[each.number("tleSortGroupRef")]["expr"]) for each in clauses]

    def _seen_through(self, node: Item) -> Item:
        """Return the expression behind a column of GROUP BY (since PostgreSQL 18 these are a table of their own)."""
        node = bare(node)
        if isinstance(node, Node) and node.tag == "VAR" and not node.number("varlevelsup"):
            entry = self._entries[node.number("varno") - 1]
            if "groupexprs" in entry.fields:
                return bare(entry.items("groupexprs")[node.number("varattno") - 1])
        return node

    # --- decisions of the plan ---------------------------------------------------------------------------------

    def reasons(self, *, is_asked: bool) -> Iterator[str]:
        """Yield why the rows or values may differ between runs; `is_asked` is False inside EXISTS."""
        query = self._query
        is_cut = query["limitCount"] is not None or query["limitOffset"] is not None
        if (is_cut or query.is_true("hasDistinctOn")) and is_asked and not self.is_total():
            word = "LIMIT" if is_cut else "DISTINCT ON"
            yield f"{word} without a total order may take other rows each time: add a key to ORDER BY"
        for node in _own(query):
            if node.tag == "AGGREF":
                name = self._known.functions.get(node.number("aggfnoid"), "")
                if name in _IN_ORDER and not self._is_ordered(node):
                    yield f"{name}() takes rows in any order: write {name}(… ORDER BY …) with all that it takes"
            elif node.tag == "WINDOWFUNC":
                yield from self._window(node)

    def _is_ordered(self, node: Node) -> bool:
        """Return whether an aggregate gets its values in one order, or in orders with equal results."""
        entries = {each.number("ressortgroupref"): each for each in node.items("args")}
        by = [bare(entries[each.number("tleSortGroupRef")]["expr"]) for each in node.items("aggorder")]
        if node["aggorder"] is None and node["aggdistinct"] is None:
            return False
        # An aggregate in a subquery may take the rows of an enclosing query, whose keys are not those of this FROM.
        if not node.number("agglevelsup") and self._are_unique(by):
            return True
        sorted_ = {each.number("tleSortGroupRef") for each in node.items("aggorder") + node.items("aggdistinct")}
        taken = [each for each in node.items("args") if not each.is_true("resjunk")]
        return all(
            bare(each["expr"]).tag in ("CONST", "PARAM")
            or (each.number("ressortgroupref") in sorted_ and self._is_exact(each["expr"]))
            for each in taken
        )

    def _window(self, node: Node) -> Iterator[str]:
        name = self._known.functions.get(node.number("winfnoid"), "")
        if name in _BY_PEERS:
            return
        (clause,) = [each for each in self._query.items("windowClause") if each["winref"] == node["winref"]]
        options = clause.number("frameOptions")
        is_by_place = name in _BY_PLACE or name in _IN_ORDER or options & (_ROWS | _GROUPS | _EXCLUDE)
        if is_by_place and not self._are_unique(
            self._sorted(clause.items("partitionClause") + clause.items("orderClause"))
        ):
            yield f"{name}() OVER without a total order: add a key to its ORDER BY"

    def doubts(self) -> Iterator[str]:
        """Yield the reasons why equal values may be shown in different ways."""
        for node in _own(self._query):
            if node.tag in ("AGGREF", "WINDOWFUNC"):
                field = "aggfnoid" if node.tag == "AGGREF" else "winfnoid"
                name = self._known.functions.get(node.number(field), "")
                if node.number(field) >= FIRST_OWN:
                    yield f"{name}() of an extension may depend on the order of its rows"
                args = [each["expr"] if each.tag == "TARGETENTRY" else each for each in node.items("args")]
                if (name in _ROUNDED or name.startswith("regr_")) and any(type_of(arg) in _FLOATS for arg in args):
                    yield f"{name}() of floats depends on the order of its rows"
                is_choosing = name in _CHOOSING or (node.fields.get("aggdistinct") is not None and name != "count")
                if is_choosing and not all(map(self._is_exact, args)):
                    yield f"{name}() may take any of several equal values"
        clauses = self._query.items("groupClause") + self._query.items("distinctClause")
        if not all(map(self._is_exact, self._sorted(clauses))):
            yield "GROUP BY or DISTINCT may show any of several equal values"
        for node in _own(self._query):
            is_merging = node.tag == "SETOPERATIONSTMT" and (not node.is_true("all") or node["op"] != _UNION)
            columns = zip(node.numbers("colTypes"), node.numbers("colCollations"), strict=True) if is_merging else ()
            if not all(self._are_identical(kind, [collation]) for kind, collation in columns):
                yield "a set operation may show any of several equal values"

    def _is_exact(self, node: Item) -> bool:
        """Return whether equal values of an expression are identical."""
        kind = type_of(node)
        if kind == types.NUMERIC:
            return node.tag == "VAR" and node.fields.get("vartypmod") not in (None, "-1")
        # The field of COLLATE is collOid, those of other nodes have names such as funccollid and inputcollid.
        collations = [name for name in node.fields if name.lower().endswith(("collid", "colloid"))]
        return self._are_identical(kind, [node.number(name) for name in collations])

    def _are_identical(self, kind: int, collations: Collection[int]) -> bool:
        """Return whether equal values of a type are identical under the collations that an expression has."""
        if kind in _TEXTS:
            return bool(collations) and self._known.odd.isdisjoint(collations)
        return kind in _EXACT

    # --- total orders ------------------------------------------------------------------------------------------

    def is_total(self) -> bool:
        """Return whether the order of the rows is the same in every run."""
        query = self._query
        outputs = [each for each in query.items("targetList") if not each.is_true("resjunk")]
        if query["groupingSets"] is not None or query.is_true("hasTargetSRFs"):
            return False
        is_grouped = query["groupClause"] is not None or query["havingQual"] is not None
        if query.is_true("hasAggs") and not is_grouped:
            return True
        if not query["jointree"].items("fromlist") and query["setOperations"] is None:
            return True
        refs = {each.number("tleSortGroupRef") for each in query.items("sortClause")}
        if all(each.number("ressortgroupref") in refs and self._is_exact(each["expr"]) for each in outputs):
            return True
        if query["setOperations"] is not None:
            return False
        if query["distinctClause"] is not None and not query.is_true("hasDistinctOn"):
            return False
        if is_grouped:
            groups = query.items("groupClause")
            return bool(groups) and all(each.number("tleSortGroupRef") in refs for each in groups)
        return self._are_unique(self._sorted(query.items("sortClause")))

    def _are_unique(self, by: list[Item]) -> bool:
        """Return whether no two rows of FROM can have the same values in all these expressions."""
        if self._query["setOperations"] is not None:
            return False
        try:
            return _Keys(self._query, self._known).are_unique(by)
        except _NoRowKeys:
            return False


def keys_of(query: Node, known: CatalogFacts) -> list[Cell]:
    """Return columns that make the order of a query's rows total; [] if there are none."""
    is_cut = query["limitCount"] is not None or query["limitOffset"] is not None
    if is_cut or _is_merging(query):
        return []
    try:
        return _Keys(query, known).cells()
    except _NoRowKeys:
        return []


def row_key(query: Node, known: CatalogFacts) -> tuple[int, ...] | None:
    """Return the positions of the result columns that identify its rows; None if the result lacks one of them."""
    if _is_merging(query):
        return None
    try:
        cells = _Keys(query, known).cells()
    except _NoRowKeys:
        return None
    shown = [_cell(bare(each["expr"])) for each in query.items("targetList") if not each.is_true("resjunk")]
    return tuple(shown.index(cell) for cell in cells) if cells and set(cells) <= set(shown) else None


def _is_merging(query: Node) -> bool:
    """Return whether a row of the answer may come from several rows of FROM, or from none."""
    return any(query[name] is not None for name in _MERGING) or any(map(query.is_true, ("hasAggs", "hasTargetSRFs")))


class _NoRowKeys(Exception):
    """A query whose rows are not identified by keys."""


class _Keys:
    """The keys of the tables in a FROM, and the columns that determine other columns."""

    def __init__(self, query: Node, known: CatalogFacts) -> None:
        self._keys: dict[int, tuple[int, ...]] = {}
        self._equal: list[tuple[Cell, Cell | None]] = []  # a column, and the column that determines it; None: constant
        self._entries, self._known = query.items("rtable"), known
        self._pairs(query["jointree"]["quals"], None)
        for item in query["jointree"].items("fromlist"):
            self._take(item)

    def _take(self, item: Node) -> frozenset[int]:
        """Return the numbers of the tables below `item`; record the equalities of its joins."""
        if item.tag == "RANGETBLREF":
            place = item.number("rtindex")
            entry = self._entries[place - 1]
            oid = entry.number("relid") if entry.number("rtekind") == RELATION else 0
            if oid not in self._known.keys:
                raise _NoRowKeys
            self._keys[place] = self._known.keys[oid]
            return frozenset({place})
        left, right = self._take(item["larg"]), self._take(item["rarg"])
        if item["jointype"] not in (INNER, LEFT):
            raise _NoRowKeys
        self._pairs(item["quals"], None if item["jointype"] == INNER else right)
        return left | right

    def _pairs(self, quals: Item, among: frozenset[int] | None) -> None:
        for qual in conjuncts(quals):
            is_equality = qual.tag == "OPEXPR" and qual.number("opno") in self._known.equals
            # Under an odd collation, one text equals several keys of a column with another collation.
            if is_equality and qual.number("inputcollid") not in self._known.odd:
                one, other = map(bare, qual.items("args"))
                for mine, value in ((one, other), (other, one)):
                    cell = _cell(mine)
                    if cell is not None and (among is None or cell[0] in among):
                        if value.tag in ("CONST", "PARAM"):
                            self._equal.append((cell, None))
                        elif (by := _cell(value)) is not None and (among is None or by[0] not in among):
                            self._equal.append((cell, by))

    def cells(self) -> list[Cell]:
        """Return the key columns of all tables: no two rows have the same values in all of them."""
        return [(place, number) for place, key in sorted(self._keys.items()) for number in key]

    def are_unique(self, by: list[Item]) -> bool:
        """Return whether no two rows can have the same values in all these expressions."""
        known = {cell for node in by if (cell := _cell(node)) is not None}
        whole: set[int] = set()
        while True:
            more = {mine for mine, other in self._equal if other is None or other in known or other[0] in whole}
            found = {place for place, key in self._keys.items() if all((place, each) in known | more for each in key)}
            if more <= known and found <= whole:
                return whole == set(self._keys)
            known, whole = known | more, whole | found


_ROWS, _GROUPS, _EXCLUDE = 0x00004, 0x00008, 0x38000


def _cell(node: Item) -> Cell | None:
    if isinstance(node, Node) and node.tag == "VAR" and not node.number("varlevelsup"):
        return node.number("varno"), node.number("varattno")
    return None


def _own(query: Node) -> Iterator[Node]:
    """Yield the nodes of a query, without those of its subqueries."""
    rest: list[Item] = list(query.fields.values())
    while rest:
        item = rest.pop()
        if isinstance(item, list):
            rest += item
        elif isinstance(item, Node) and item.tag != "QUERY":
            yield item
            rest += item.fields.values()
