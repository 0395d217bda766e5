"""The reads of a parse tree: relations with their columns, functions, types, collations. Pure.

Only known nodes are accepted, and every field of them is read; any other node raises UnsupportedTree. Scoped callers
rely on it: they may run a statement if it reads only their tables.
"""

from __future__ import annotations

import msgspec

from headwater.sources.postgres.query.analysis.immutable_functions import FIRST_OWN
from headwater.sources.postgres.query.analysis.parameters import is_moment
from headwater.sources.postgres.query.analysis.parse_tree import Item, Node, UnsupportedTree, below

# Older servers use a shorter name for some of them.
_TAGS = """
ALIAS FROMEXPR JOINEXPR RANGETBLREF RANGETBLFUNCTION TARGETENTRY CONST PARAM OPEXPR FUNCEXPR DISTINCTEXPR NULLIFEXPR
SCALARARRAYOPEXPR BOOLEXPR SUBLINK NULLTEST BOOLEANTEST CASEEXPR CASEWHEN CASE WHEN CASETESTEXPR COALESCEEXPR COALESCE
MINMAXEXPR MINMAX ARRAYEXPR ARRAY ROWEXPR ROW ROWCOMPAREEXPR ROWCOMPARE RELABELTYPE COERCEVIAIO ARRAYCOERCEEXPR
CONVERTROWTYPEEXPR COLLATEEXPR COLLATE FIELDSELECT SUBSCRIPTINGREF COERCETODOMAIN AGGREF WINDOWFUNC WINDOWCLAUSE
GROUPINGFUNC GROUPINGSET SORTGROUPCLAUSE COMMONTABLEEXPR SETOPERATIONSTMT TABLESAMPLECLAUSE
"""
_PLAIN = frozenset(_TAGS.split())
# Fields that contain the type of a node.
TYPE_FIELDS = (
    *("vartype", "consttype", "paramtype", "funcresulttype", "opresulttype", "resulttype", "aggtype", "wintype"),
    *("casetype", "coalescetype", "minmaxtype", "array_typeid", "row_typeid", "refrestype"),
)
_TYPE_LISTS = ("colTypes", "coltypes", "ctecoltypes", "funccoltypes", "aggargtypes")
FUNCTION_FIELDS = ("funcid", "opfuncid", "aggfnoid", "winfnoid", "elemfuncid", "startInRangeFunc", "endInRangeFunc")
OPERATOR_FIELDS = ("opno", "eqop", "sortop", "cycle_mark_neop")
_COLLATIONS = ("varcollid", "constcollid", "paramcollid", "inputcollid", "funccollid", "opcollid", "collOid")
_TRUTHS = frozenset({"BOOLEXPR", "NULLTEST", "BOOLEANTEST", "SCALARARRAYOPEXPR", "ROWCOMPAREEXPR", "DISTINCTEXPR"})
RELATION, SUBQUERY, JOIN, FUNCTION, TABLE_FUNCTION, VALUES, CTE, _, RESULT, GROUP = range(10)
WHOLE_ROW = 0
_NOW = "the current time or user may differ each time"
# The supported kinds of range-table entries. XMLTABLE and JSON_TABLE are not supported.
_KINDS = frozenset({RELATION, SUBQUERY, JOIN, FUNCTION, VALUES, CTE, RESULT, GROUP})
# Fields that `Reader` does not walk: entries are walked one by one, permissions contain no expressions.
_UNWALKED = frozenset({"rtable", "rteperminfos"})
# The columns of a join are walked where they are used. They contain only these nodes.
_OF_JOINS = frozenset(
    (
        *("VAR", "CONST", "RELABELTYPE", "FUNCEXPR", "COALESCEEXPR", "COALESCE", "COERCEVIAIO", "COERCETODOMAIN"),
        *("ARRAYCOERCEEXPR", "CASETESTEXPR"),
    )
)


class Writes(Exception):
    """A statement that does more than reading."""


class UsedObjects(msgspec.Struct):
    """Everything a statement uses, by oid. Column number 0 is the whole row, negative numbers are system columns."""

    columns: dict[int, set[int]] = msgspec.field(default_factory=dict)
    by_view: dict[int, set[int]] = msgspec.field(default_factory=dict)  # relations that each view names
    counts: dict[int, int] = msgspec.field(default_factory=dict)  # number of occurrences of a relation
    heirs: set[int] = msgspec.field(default_factory=set)  # tables that are read with their children
    functions: set[int] = msgspec.field(default_factory=set)
    operators: set[int] = msgspec.field(default_factory=set)
    types: set[int] = msgspec.field(default_factory=set)
    collations: set[int] = msgspec.field(default_factory=set)
    conversions: set[tuple[int, int]] = msgspec.field(default_factory=set)  # by way of text: from, to
    has_moment: bool = False  # a constant is a date or a time
    reasons: set[str] = msgspec.field(default_factory=set)  # why no answer may be cached


class Reader:
    """A walk over trees that records reads in `used`. `own` is the view of the rule: older servers mention it there."""

    def __init__(self, used: UsedObjects, own: int = 0) -> None:
        self._used, self._own = used, own

    def query(self, query: Node, outer: tuple[Node, ...] = ()) -> None:
        """Read a QUERY; `outer` are the enclosing queries, the nearest first."""
        if query.tag != "QUERY":
            raise UnsupportedTree(f"a node {query.tag} is not a query")
        if query["commandType"] != "1" or query.is_true("hasModifyingCTE") or query["utilityStmt"] is not None:
            raise Writes
        if query["rowMarks"] is not None:
            raise Writes
        scope = (query, *outer)
        for entry in query.items("rtable"):
            self._entry(entry, scope)
        for name, value in query.fields.items():
            if name not in _UNWALKED:
                self.item(value, scope)

    def expression(self, tree: Item) -> None:
        """Read an expression over the columns of one row. UnsupportedTree if it has subqueries."""
        for node in below(tree):
            if node.tag == "VAR" or (node.tag in _PLAIN and node.tag != "SUBLINK"):
                self._noted(node)
            elif node.tag == "SQLVALUEFUNCTION":
                self._used.reasons.add(_NOW)
            else:
                raise UnsupportedTree(f"a node {node.tag} is not supported")

    def item(self, item: Item, scope: tuple[Node, ...]) -> None:
        """Read any item of a query; UnsupportedTree for an unknown node."""
        if isinstance(item, list):
            for each in item:
                self.item(each, scope)
        elif isinstance(item, Node):
            if item.tag == "QUERY":
                self.query(item, scope)
            elif item.tag == "VAR":
                self._noted(item)
                self._variable(item, scope)
            elif item.tag in _PLAIN:
                self._noted(item)
                for value in item.fields.values():
                    self.item(value, scope)
            elif item.tag == "SQLVALUEFUNCTION":
                self._used.reasons.add(_NOW)
                for value in item.fields.values():
                    self.item(value, scope)
            else:
                raise UnsupportedTree(f"a node {item.tag} is not supported")

    def _entry(self, entry: Node, scope: tuple[Node, ...]) -> None:
        """Read a range-table entry: every field, whatever its kind, so that no expression is skipped."""
        kind = entry.number("rtekind")
        if kind not in _KINDS:
            raise UnsupportedTree(f"a range-table entry of kind {kind} is not supported")
        if kind == RELATION and entry.number("relid") != self._own:
            self._relation(entry)
        for name, value in entry.fields.items():
            if name == "joinaliasvars" and kind == JOIN:
                for node in below(value):
                    if node.tag not in _OF_JOINS:
                        raise UnsupportedTree(f"a node {node.tag} is not supported as a column of a join")
            else:
                self.item(value, scope)

    def _relation(self, entry: Node) -> None:
        oid = entry.number("relid")
        self._used.columns.setdefault(oid, set())
        self._used.by_view.setdefault(self._own, set()).add(oid)
        self._used.counts[oid] = self._used.counts.get(oid, 0) + 1
        if entry.is_true("inh"):
            self._used.heirs.add(oid)
        sample = entry["tablesample"]
        if sample is not None:
            self._used.reasons.add("TABLESAMPLE may take other rows each time")
            if sample.number("tsmhandler") >= FIRST_OWN:
                self._used.functions.add(sample.number("tsmhandler"))

    def _variable(self, var: Node, scope: tuple[Node, ...]) -> None:
        above = var.number("varlevelsup")
        if above >= len(scope):
            raise UnsupportedTree("a column refers to a query that is not in the tree")
        scope = scope[above:]
        entries, place = scope[0].items("rtable"), var.number("varno") - 1
        if not 0 <= place < len(entries):
            raise UnsupportedTree("a column refers to a table that is not in the query")
        entry, number = entries[place], var.number("varattno")
        kind = entry.number("rtekind")
        if kind == RELATION:
            self._used.columns.setdefault(entry.number("relid"), set()).add(number)
        elif kind == JOIN:
            aliases = entry.items("joinaliasvars")
            self.item(aliases if number == WHOLE_ROW else aliases[number - 1], scope)

    def _noted(self, node: Node) -> None:
        used, fields = self._used, node.fields
        used.types.update(int(fields[name]) for name in TYPE_FIELDS if name in fields)
        for name in _TYPE_LISTS:
            if isinstance(fields.get(name), list):
                used.types.update(node.numbers(name))
        used.functions.update(int(fields[name]) for name in FUNCTION_FIELDS if name in fields)
        used.operators.update(int(fields[name]) for name in OPERATOR_FIELDS if name in fields)
        used.collations.update(int(fields[name]) for name in _COLLATIONS if name in fields)
        if node.tag in ("ROWCOMPAREEXPR", "ROWCOMPARE"):
            used.operators.update(node.numbers("opnos"))
        elif node.tag == "COERCEVIAIO":
            used.conversions.add((type_of(node["arg"]), node.number("resulttype")))
        elif node.tag == "CONST":
            used.has_moment |= is_moment(node.number("consttype"))


def type_of(node: Item) -> int:
    """Return the oid of the type of an expression; UnsupportedTree if it is not known."""
    if not isinstance(node, Node):
        raise UnsupportedTree("an expression is missing")
    if node.tag in _TRUTHS:
        return 16
    if node.tag in ("COLLATEEXPR", "COLLATE"):
        return type_of(node["arg"])
    for name in TYPE_FIELDS:
        if name in node.fields:
            return node.number(name)
    raise UnsupportedTree(f"the type of a node {node.tag} is not known")
