"""Growth of a statement inside PostgreSQL before it runs: PostgreSQL copies operands and columns of subqueries. Pure.

Copies of nested copies take exponentially growing memory, and PostgreSQL does not limit it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from headwater.errors import InvalidRequest
from headwater.sources.postgres.query.analysis.parse_tree import Item, Node, UnsupportedTree
from headwater.sources.postgres.query.analysis.tree_reads import CTE, GROUP, JOIN, SUBQUERY
from headwater.sources.postgres.query.statement_rules import comment_end

MAX_WORDS = 200_000  # of a statement with all operands copied
MAX_NODES = 200_000  # of its tree with all subqueries inlined
FIELDS = 400  # assumed for a row whose fields are not counted
SELECT = "1"  # the command of a query
MATERIALIZED_DEFAULT, MATERIALIZED_NEVER = "0", "2"

_LETTER = r"A-Za-z_\x80-\U0010ffff"
_SPACE = r"[\x20\t\n\r\f\v]"  # PostgreSQL treats other spaces as letters
# An unclosed token reaches to the end of the text, so that no text takes more than linear time.
_ESCAPED = r"'(?:[^'\\]|\\.|'')*+(?:'|\Z)"
_TOKEN = re.compile(
    rf"""
    (?P<space>{_SPACE}+|--[^\n\r]*)
  | (?P<comment>/\*)
  | (?P<escaped>[eE]{_ESCAPED})
  | (?P<text>'[^']*+(?:''[^']*+)*+(?:'|\Z))
  | (?P<quoted>\$(?P<tag>(?:[{_LETTER}][{_LETTER}0-9]*)?)\$.*?(?:\$(?P=tag)\$|\Z))
  | (?P<name>"[^"]*+(?:""[^"]*+)*+(?:"|\Z))
  | (?P<word>[{_LETTER}][{_LETTER}0-9$]*)
  | (?P<sign>\$[0-9]+|[0-9]+(?:\.[0-9]*)?|\.[0-9]+|.)
    """,
    re.VERBOSE | re.DOTALL,
)
# A string continues after a line break, and its escapes with it.
_CONTINUED = re.compile(
    rf"(?:[ \t\f\v]|--[^\n\r]*)*+[\n\r](?:{_SPACE}|--[^\n\r]*[\n\r])*+{_ESCAPED}",
    re.DOTALL,
)
_COPYING = re.compile(r"between|json|window|\*|(?:\b|[0-9])in\b", re.IGNORECASE)
# Reserved words that cannot be in the left operand of BETWEEN or IN, except inside brackets.
_ENDS_OPERAND = frozenset(
    ("and", "or", "select", "from", "where", "on", "having", "returning", "when", "then", "else", "limit", "offset")
)
_QUERIES = frozenset({"select", "with", "table"})
_FRAMES = frozenset({"rows", "range", "groups"})
_BEFORE_ALL_COLUMNS = frozenset({"select", "distinct", "all", "returning", ","})
# PostgreSQL keeps the argument of these functions twice: as written, and converted to JSON.
_OF_JSON = frozenset(
    ("json", "json_array", "json_arrayagg", "json_exists", "json_object", "json_objectagg")
    + ("json_query", "json_scalar", "json_serialize", "json_table", "json_value")
)


class _Group(msgspec.Struct):
    """The tokens between two brackets, or between CASE and END, including copied operands."""

    opening: str
    copied: int | None = None  # for the list of IN: the size of its left operand
    times: int = 1  # how often the whole group is copied
    may_be_window: bool = False  # it follows AS or OVER
    is_window: bool = False  # it defines a window, whose columns are copied for each reference
    windows: int = 0  # of the outermost group: the size of all windows
    references: int = 0  # of the outermost group: the number of possible references to a window
    size: int = 0
    operand: int = 0  # the part of `size` that may be the left operand of the next operator
    weight: int = 1  # how often the next tokens are copied
    items: int = 0  # of a list, those that PostgreSQL may compare with the operand one by one
    is_compared: bool = False  # the current item is one of them: all but plain numbers
    is_query: bool = False

    def add(self, size: int) -> None:
        self.size += size * self.weight
        self.operand += size * self.weight

    def copy_operand(self, times: int) -> None:
        self.size += self.operand * (times - 1)
        self.operand *= times

    def end_item(self) -> None:
        self.items += self.is_compared
        self.is_compared = False
        self.operand = 0


def check_text(sql: str) -> None:
    """Raise InvalidRequest for a statement that grows too large when PostgreSQL parses it."""
    if _COPYING.search(sql) and _size_with_copies(sql) > MAX_WORDS:
        raise InvalidRequest(
            f"the statement would have more than {MAX_WORDS} words as PostgreSQL copies the operands of BETWEEN, IN, .*"
            " and functions of SQL/JSON, and the columns of windows",
            hint="Do not nest them in one another; compute the operand in a subquery.",
        )


def _size_with_copies(sql: str) -> int:
    """Estimate the number of tokens of a statement after PostgreSQL's parser has copied operands."""
    groups, last = [_Group("")], ""
    for kind, word in _tokens(sql):
        group, depth = groups[-1], len(groups)
        is_key = kind == "word" and last != "."
        if word in ("(", "["):
            group.is_query |= last == "values" and group.size == 1  # otherwise it is the name of a column
            copied, times = group.operand if last == "in" else None, 2 if last in _OF_JSON else 1
            groups.append(_Group(word, copied, times, may_be_window=last in ("as", "over")))
        elif is_key and word == "case":
            groups.append(_Group(word))
        elif word in (")", "]"):
            while len(groups) > 1 and groups[-1].opening == "case":
                _close(groups)
            if len(groups) > 1:
                _close(groups)
        elif is_key and word == "end" and group.opening == "case":
            _close(groups)
        elif word == ",":
            group.end_item()
        elif word == "*":
            if last == ".":
                group.copy_operand(FIELDS)
            elif last in _BEFORE_ALL_COLUMNS:
                group.add(FIELDS)
        elif is_key and word in _ENDS_OPERAND:
            group.is_query |= not group.size and word in _QUERIES
            group.operand = 0
        elif is_key and word == "between":
            group.copy_operand(2)
        elif is_key and word == "symmetric":
            group.copy_operand(2)
            group.weight = 2
        else:
            if word == "json" and last in ("is", "not"):
                group.copy_operand(2)
            group.is_query |= is_key and not group.size and word in _QUERIES
            if group.may_be_window and group.size < 2:
                group.is_window |= is_key and word in ("partition", "order")
                is_name = not (group.size or group.is_window or group.is_query or word in _FRAMES)
                groups[0].references += is_name
            group.is_compared |= kind != "sign" or word[0] == "$"
        (group if len(groups) > depth else groups[-1]).add(1)  # a bracket belongs to the enclosing group
        last = word if kind != "name" else ""
        if groups[-1].size > MAX_WORDS:
            return groups[-1].size
    while len(groups) > 1:
        _close(groups)
    return groups[0].size + groups[0].windows * groups[0].references


def _close(groups: list[_Group]) -> None:
    """Merge the last group into the enclosing group."""
    inner, outer = groups.pop(), groups[-1]
    inner.end_item()
    outer.add(inner.size * inner.times)
    outer.is_compared = True
    groups[0].windows += inner.size if inner.is_window else 0
    if inner.copied is not None and not inner.is_query and inner.items > 1:
        outer.add(inner.copied * (inner.items - 1))


def _tokens(sql: str) -> Iterator[tuple[str, str]]:
    """Yield kind and text of each token: words in lower case, signs as written, "" for strings and quoted names."""
    for kind, text, _ in tokens(sql):
        yield kind, text.lower() if kind == "word" else text if kind == "sign" else ""


def tokens(sql: str) -> Iterator[tuple[str, str, int]]:
    """Yield kind (word, quoted name, text, sign), text as written ("" for a string) and start of each token."""
    place = 0
    while place < len(sql):
        found = _TOKEN.match(sql, place)
        assert found is not None
        kind, place = str(found.lastgroup), found.end()
        if kind == "comment":
            place = comment_end(sql, found.start())
        elif kind in ("escaped", "text", "quoted", "tag"):
            while kind == "escaped" and (more := _CONTINUED.match(sql, place)):
                place = more.end()
            yield "text", "", found.start()
        elif kind != "space":
            yield kind, found[0], found.start()


def check_tree(items: list[Item]) -> None:
    """Raise InvalidRequest for a tree that is too deep, or grows too large when PostgreSQL inlines its subqueries."""
    try:
        size = _ExpandedSize().size(items, ())
    except RecursionError:
        raise InvalidRequest("the statement is nested too deeply", hint="Nest subqueries less deeply.") from None
    if size > MAX_NODES:
        raise InvalidRequest(
            f"the statement would have more than {MAX_NODES} parts once its subqueries are expanded",
            hint="Write WITH name AS MATERIALIZED (…) for a subquery whose columns are used several times.",
        )


class _ExpandedSize:
    """The number of nodes of a tree in which columns of subqueries are replaced by their expressions."""

    def __init__(self) -> None:
        self._columns: dict[tuple[int, int], int] = {}  # by range-table entry and number
        self._queries: dict[int, int] = {}

    def size(self, item: Item, scope: tuple[Node, ...]) -> int:
        if isinstance(item, list):
            return sum([self.size(each, scope) for each in item])
        if not isinstance(item, Node):
            return 0
        if item.tag == "QUERY":
            return self._query(item, scope)
        if item.tag == "VAR":
            return self._column(item, scope)
        if item.tag == "RANGETBLENTRY" or item.tag == "RTE":
            return self._entry(item, scope)
        if item.tag == "COMMONTABLEEXPR":
            return 0 if _is_inlined(item) else 1 + self.size(item["ctequery"], scope)
        return 1 + sum([self.size(value, scope) for value in item.fields.values()])

    def _query(self, query: Node, scope: tuple[Node, ...]) -> int:
        if id(query) not in self._queries:
            inner = (query, *scope)
            self._queries[id(query)] = 1 + sum([self.size(value, inner) for value in query.fields.values()])
        return self._queries[id(query)]

    def _entry(self, entry: Node, scope: tuple[Node, ...]) -> int:
        """Return the size of a range-table entry; the columns of a join are counted where they are used."""
        fields = {name: value for name, value in entry.fields.items() if name != "joinaliasvars"}
        found = 1 + sum([self.size(value, scope) for value in fields.values()])
        if entry.number("rtekind") == CTE and (inlined := _inlined(entry, scope)) is not None:
            found += self.size(*inlined)
        return found

    def _column(self, var: Node, scope: tuple[Node, ...]) -> int:
        scope = scope[var.number("varlevelsup") :]
        if not scope:
            raise UnsupportedTree("a column refers to a query that is not in the tree")
        entries, place = scope[0].items("rtable"), var.number("varno") - 1
        if not 0 <= place < len(entries):
            return 1  # EXCLUDED, OLD and NEW have numbers of their own
        entry, number = entries[place], var.number("varattno")
        key = id(entry), number
        if key not in self._columns:
            self._columns[key] = 1  # while it is being counted: nothing contains itself
            self._columns[key] = 1 + self._expression(entry, number, scope)
        return self._columns[key]

    def _expression(self, entry: Node, number: int, scope: tuple[Node, ...]) -> int:
        """Return the size of the expression behind a column of `entry`; 0 for a column of a table."""
        kind = entry.number("rtekind")
        if kind == JOIN:
            return self.size(_numbered(entry.items("joinaliasvars"), number), scope)
        if kind == GROUP:
            return self.size(_numbered(entry.items("groupexprs"), number), scope)
        if kind == SUBQUERY:
            query, around = entry["subquery"], scope
        elif kind == CTE and (inlined := _inlined(entry, scope)) is not None:
            query, around = inlined
        else:
            return 0
        if not isinstance(query, Node) or query.tag != "QUERY":
            raise UnsupportedTree("the subquery of a range-table entry is not a QUERY node")
        outputs = "targetList" if query["commandType"] == SELECT else "returningList"
        if query["limitCount"] is not None or query["limitOffset"] is not None:
            return 0  # the subquery is computed by itself, and no condition is moved into it
        return self.size([_computed(each) for each in _numbered(query.items(outputs), number)], (query, *around))


def _numbered(items: list[Item], number: int) -> list[Item]:
    """Return a list of the item of column `number`; all items for the whole row (0)."""
    if number > len(items):
        raise UnsupportedTree("a column refers to a result column that does not exist")
    return items if number <= 0 else [items[number - 1]]


def _computed(target: Item) -> Item:
    """Return the expression of a column that PostgreSQL may compute elsewhere; None for aggregates."""
    found = target["expr"]
    return None if isinstance(found, Node) and found.tag in ("AGGREF", "WINDOWFUNC") else found


def _is_inlined(cte: Node) -> bool:
    wanted = cte["ctematerialized"]
    is_once = wanted == MATERIALIZED_DEFAULT and cte.number("cterefcount") == 1
    return not cte.is_true("cterecursive") and (wanted == MATERIALIZED_NEVER or is_once)


def _inlined(entry: Node, scope: tuple[Node, ...]) -> tuple[Node, tuple[Node, ...]] | None:
    """Return the inlined query of a reference to WITH, and its scope; None if it is computed once."""
    scope = scope[entry.number("ctelevelsup") :]
    for cte in scope[0].items("cteList") if scope else ():
        if cte["ctename"] == entry["ctename"]:
            return (cte["ctequery"], scope) if _is_inlined(cte) else None
    return None
