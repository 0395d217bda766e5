"""Syntax tree of a SELECT, after SQLite's own grammar. Nodes are compared by identity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec


class Node(msgspec.Struct, eq=False):
    """Base class of the nodes of the tree."""


class Literal(Node):
    """A literal value; `text` is its spelling."""

    text: str


class Bind(Node):
    """A parameter: its number and its spelling."""

    slot: int
    text: str


class Ref(Node):
    """A column name, and after name resolution the column or expression that it refers to."""

    table: str | None
    name: str
    is_quoted: bool = False
    source: Source | None = None
    column: str | int = ""  # name of a table's column, or position of a query's column
    stands_for: Any = None  # the expression of which this name is an alias
    boolean: int | None = None  # value of TRUE or FALSE, where no column has that name


class Unary(Node):
    """-x, +x, ~x, NOT x."""

    op: str
    of: Any


class Binary(Node):
    """x op y: arithmetic, comparison, IS, LIKE and similar. `op` is spelled as in SQLite and includes NOT."""

    op: str
    left: Any
    right: Any
    escape: Any = None


class Chain(Node):
    """x AND y AND z, or the same with OR: flat, so that a long chain is not deeply nested."""

    op: str
    parts: list[Any]


class Between(Node):
    """x [NOT] BETWEEN y AND z."""

    of: Any
    low: Any
    high: Any
    negated: bool


class In(Node):
    """x [NOT] IN (…): a list, a query, or a table name."""

    of: Any
    negated: bool
    items: list[Any] | None = None
    query: Query | None = None


class Null(Node):
    """x ISNULL, x NOTNULL, x NOT NULL."""

    of: Any
    negated: bool
    word: str


class Collate(Node):
    """x COLLATE name."""

    of: Any
    name: str


class Cast(Node):
    """CAST(x AS type)."""

    of: Any
    type: str


class Case(Node):
    """CASE [x] WHEN … THEN … ELSE … END."""

    base: Any
    whens: list[tuple[Any, Any]]
    otherwise: Any


class Call(Node):
    """A function call. `args` is None for f(*); `bare` for CURRENT_TIMESTAMP and similar."""

    name: str
    args: list[Any] | None
    distinct: bool = False
    order: list[Term] = []
    where: Any = None
    over: Window | str | None = None
    bare: bool = False


class Row(Node):
    """(x, y): several values."""

    items: list[Any]


class Subquery(Node):
    """(SELECT …) as a value, or EXISTS (SELECT …)."""

    query: Query
    exists: bool = False


class Term(Node):
    """A term of ORDER BY."""

    of: Any
    descends: bool = False
    nulls: str = ""
    end: int = 0
    output: int | None = None  # position of the result column that the term names by number or alias


class Window(Node):
    """The contents of OVER (…); the frame is a list of words and expressions."""

    base: str | None
    partition: list[Any]
    order: list[Term]
    frame: list[Any]


class Output(Node):
    """A result column; `of` is None for * and t.* until they are expanded."""

    of: Any
    name: str | None
    star: str | None = None  # the table of t.*


class Source(Node):
    """A source in FROM: a table, a view, a WITH name, a function or a query."""

    name: str | None
    alias: str | None
    query: Query | None = None  # own tree of a query; for views and WITH names the shared tree
    args: list[Any] | None = None
    hint: str = ""  # INDEXED BY …
    is_main: bool = False  # qualified with its schema, so that no WITH name hides it
    # After resolving:
    kind: str = ""  # table, view, with, recursive, query, function
    table: Any = None  # model Table of a base table
    label: str = ""  # its unique name in the rendered text
    columns: list[str | None] = []  # names of a query's columns


class Join(Node):
    """left KIND JOIN right ON …; kind is "", "LEFT", "RIGHT", "FULL", with the words as written."""

    left: From
    right: From
    kind: str
    words: str
    natural: bool = False
    on: Any = None
    using: list[str] | None = None
    shared: list[tuple[Ref, Ref]] = []  # pairs of columns that USING makes equal
    is_group: bool = False  # in parentheses


From = Source | Join


class Select(Node):
    """One SELECT without ORDER BY and LIMIT; or VALUES, with all its rows in `values`."""

    outputs: list[Output]
    distinct: bool = False
    source: From | None = None
    where: Any = None
    group: list[Any] = []
    having: Any = None
    windows: list[tuple[str, Window]] = []
    values: list[list[Any]] | None = None


class Cte(Node):
    """name(columns) AS (query)."""

    name: str
    columns: list[str] | None
    query: Query
    hint: str = ""


class Query(Node):
    """[WITH …] SELECT … UNION SELECT … ORDER BY … LIMIT …"""

    selects: list[Select]
    ops: list[str]  # set operators between the selects
    ctes: list[Cte] = []
    recursive: bool = False
    order: list[Term] = []
    limit: Any = None
    offset: Any = None
    is_recursive: bool = False  # the body of a WITH name that reads itself
    body_end: int = 0  # position in the text for an ORDER BY, if there is none
    kinds: dict[int, Any] = {}  # by position, cached by `facts.output_kind`


def children(node: Any) -> Iterator[Any]:
    """Yield the expressions and queries directly below an expression."""
    match node:
        case Ref():
            if node.stands_for is not None:
                yield node.stands_for
        case Unary() | Collate() | Cast() | Null():
            yield node.of
        case Binary():
            yield from (node.left, node.right)
            if node.escape is not None:
                yield node.escape
        case Chain():
            yield from node.parts
        case Between():
            yield from (node.of, node.low, node.high)
        case In():
            yield node.of
            yield from node.items or ()
            if node.query is not None:
                yield node.query
        case Case():
            yield from (part for part in (node.base, node.otherwise) if part is not None)
            for when, then in node.whens:
                yield from (when, then)
        case Call():
            yield from node.args or ()
            yield from (term.of for term in node.order)
            if node.where is not None:
                yield node.where
            if isinstance(node.over, Window):
                yield from inside(node.over)
        case Row():
            yield from node.items
        case Subquery():
            yield node.query


def inside(window: Window) -> Iterator[Any]:
    """Yield the expressions of PARTITION BY, ORDER BY and the frame of a window."""
    yield from window.partition
    yield from (term.of for term in window.order)
    yield from (part for part in window.frame if not isinstance(part, str))


def below(node: Any) -> Iterator[Any]:
    """Yield `node` and every expression below it; inner queries are yielded, not entered."""
    stack = [node]
    while stack:
        found = stack.pop()
        yield found
        if not isinstance(found, Query):
            stack.extend(children(found))


def sources(tree: From | None) -> Iterator[Source]:
    """Yield the joined sources from left to right."""
    if isinstance(tree, Join):
        yield from sources(tree.left)
        yield from sources(tree.right)
    elif tree is not None:
        yield tree


def joins(tree: From | None) -> Iterator[Join]:
    """Yield the joins of a FROM, innermost first."""
    if isinstance(tree, Join):
        yield from joins(tree.left)
        yield from joins(tree.right)
        yield tree


def names_in(node: Any) -> Iterator[Ref]:
    """Yield every column name in an expression or query, inner queries included."""
    stack = [node]
    while stack:
        found = stack.pop()
        if isinstance(found, Ref):
            yield found
        stack.extend(parts_of(found) if isinstance(found, Query) else children(found))


def parts_of(query: Query) -> Iterator[Any]:
    """Yield the expressions and queries directly inside a query, without bodies of WITH, which see no outer names."""
    for select in query.selects:
        yield from of_select(select)
    yield from (term.of for term in query.order if term.output is None)
    yield from (part for part in (query.limit, query.offset) if part is not None)


def of_select(select: Select) -> Iterator[Any]:
    """Yield the expressions and queries directly inside a SELECT."""
    for row in select.values or ():
        yield from row
    if select.values is None:
        yield from (output.of for output in select.outputs)
    yield from (part for part in (select.where, select.having, *select.group) if part is not None)
    for _, window in select.windows:
        yield from inside(window)
    for join in joins(select.source):
        if join.on is not None:
            yield join.on
    for source in sources(select.source):
        yield from source.args or ()
        if source.kind == "query" and source.query is not None:
            yield source.query
