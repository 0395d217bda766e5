"""Resolution of every name in a statement by SQLite's rules: innermost FROM first, then aliases, then outer queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headwater.model.table import Table
from headwater.sources.sqlite.connection import ROWID_NAMES
from headwater.sources.sqlite.query.syntax import tree
from headwater.sources.sqlite.query.syntax.lexer import NotAnalysed, folded
from headwater.sources.sqlite.query.syntax.parser import parse_view

_JSON = ["key", "value", "type", "atom", "id", "parent", "fullkey", "path", "json", "root"]
# Table-valued functions, which depend only on their arguments.
FUNCTIONS_OF_ROWS = {"json_each": _JSON, "json_tree": _JSON}
_MAX_VIEWS = 30
_CALLS = """
count sum total avg group_concat string_agg json_group_array json_group_object jsonb_group_array jsonb_group_object
median percentile percentile_cont percentile_disc
"""
_AGGREGATES = frozenset(_CALLS.split())


def is_aggregate(node: Any) -> bool:
    """Return whether an expression is an aggregate call."""
    if not isinstance(node, tree.Call) or node.over is not None:
        return False
    name = node.name.lower()
    return name in _AGGREGATES or (name in ("min", "max") and len(node.args or ()) == 1)


class Scope(msgspec.Struct):
    """The sources, merged columns and aliases that names in one SELECT may refer to."""

    sources: list[tree.Source]
    shared: dict[str, tree.Ref]  # columns merged by USING, by folded name
    outer: Scope | None
    outputs: list[tree.Output] | None = None  # set where aliases are visible


class View(msgspec.Struct):
    """A view that a statement uses: its resolved query and its text."""

    columns: list[str] | None
    query: tree.Query
    text: str


Env = dict[str, tree.Cte]


class Names:
    """Name resolver of one statement; `read` collects every base table column that it names, needed or not."""

    def __init__(self, tables: Mapping[str, Table], views: Mapping[str, str]) -> None:
        self._tables = {folded(name): table for name, table in tables.items()}
        self._definitions = {folded(name): sql for name, sql in views.items()}
        self.views: dict[str, View] = {}
        self.read: set[tuple[str, str]] = set()
        self._labels = 0
        self._state: dict[int, str] = {}  # state of WITH names, by the identity of the node
        self._envs: dict[int, Env] = {}

    def query(self, query: tree.Query, outer: Scope | None = None, env: Env | None = None) -> None:
        """Resolve a query and all its parts."""
        env = {**(env or {}), **{folded(cte.name): cte for cte in query.ctes}}
        for cte in query.ctes:
            self._envs[id(cte)] = env
        for select in query.selects:
            self._select(select, outer, env, query.order if len(query.selects) == 1 else [])
        if len(query.selects) > 1:
            self._compound_order(query)
        for limit in (query.limit, query.offset):
            if limit is not None:
                self._expression(limit, Scope([], {}, None), env)
        for cte in query.ctes:
            if id(cte) not in self._state:
                self._cte(cte)

    def _cte(self, cte: tree.Cte) -> None:
        self._state[id(cte)] = "reading"
        self.query(cte.query, None, self._envs[id(cte)])
        self._state[id(cte)] = "known"

    # --- SELECT ----------------------------------------------------------------------------------------------

    def _select(self, select: tree.Select, outer: Scope | None, env: Env, order: list[tree.Term]) -> None:
        scope = Scope(list(tree.sources(select.source)), {}, outer)
        if select.values is not None:
            for row in select.values:
                for item in row:
                    self._expression(item, scope, env)
            return
        for place, source in enumerate(scope.sources):
            self._source(source, Scope(scope.sources[:place], {}, outer), outer, env)
        for join in tree.joins(select.source):
            self._join(join, scope, env)
        select.outputs = [found for output in select.outputs for found in self._expanded(output, scope)]
        for output in select.outputs:
            self._expression(output.of, scope, env)
            if output.name is None:
                output.name = _name_of(output.of)
        scope.outputs = select.outputs
        for _, window in select.windows:
            for part in tree.inside(window):
                self._expression(part, scope, env)
        for part in (select.where, select.having, *select.group):
            if part is not None:
                self._expression(part, scope, env)
        for term in order:
            self._term(term, scope, env)

    def _source(self, source: tree.Source, before: Scope, outer: Scope | None, env: Env) -> None:
        self._labels += 1
        source.label = f"place {self._labels}"
        if source.args is not None:
            self._function(source, before, env)
        elif source.name is None:
            assert source.query is not None
            self.query(source.query, outer, env)
            source.kind, source.columns = "query", columns_of(source.query)
        elif folded(source.name) in env and not source.is_main:
            self._with_name(source, env[folded(source.name)])
        else:
            self._stored(source, source.name)

    def _function(self, source: tree.Source, before: Scope, env: Env) -> None:
        columns = FUNCTIONS_OF_ROWS.get((source.name or "").lower())
        if columns is None:
            raise NotAnalysed(f"our parser does not analyse the table-valued function {source.name}()")
        for arg in source.args or ():
            self._expression(arg, before, env)
        source.kind, source.columns = "function", list(columns)

    def _with_name(self, source: tree.Source, cte: tree.Cte) -> None:
        state = self._state.get(id(cte))
        if state is None:
            self._cte(cte)
        source.kind = "with" if state != "reading" else "recursive"
        cte.query.is_recursive = cte.query.is_recursive or state == "reading"
        if cte.query.selects[0].outputs and any(output.of is None for output in cte.query.selects[0].outputs):
            raise NotAnalysed("the first SELECT of a recursive WITH reads its own name")
        source.query, source.columns = cte.query, _renamed(cte.columns, columns_of(cte.query))

    def _stored(self, source: tree.Source, name: str) -> None:
        if (table := self._tables.get(folded(name))) is not None:
            source.kind, source.table = "table", table
            self.read.add((table.name, ""))
            return
        if folded(name) not in self._definitions:
            raise NotAnalysed("the query names a table or view that SQLite did not report as read")
        view = self.views.get(folded(name))
        if view is None:
            if len(self.views) >= _MAX_VIEWS:
                raise NotAnalysed(f"more than {_MAX_VIEWS} views")
            view = self.views[folded(name)] = View(*parse_view(self._definitions[folded(name)]))
            self.query(view.query)
        source.kind, source.query = "view", view.query
        source.columns = _renamed(view.columns, columns_of(view.query))

    def _join(self, join: tree.Join, scope: Scope, env: Env) -> None:
        if join.natural:
            here = {folded(name) for source in tree.sources(join.right) for name in _names(source)}
            left = [name for source in tree.sources(join.left) for name in _names(source)]
            names = list(dict.fromkeys(name for name in left if folded(name) in here))
        else:
            names = join.using or []
        for name in names:
            self._share(join, name, scope)
        if join.on is not None:
            self._expression(join.on, scope, env)
        if join.is_group:  # SQLite turns a join in brackets into a SELECT * of all columns, rowids included
            tables = [source.table for source in tree.sources(join) if source.table is not None]
            self.read |= {(table.name, name) for table in tables for name in (*table.names, "ROWID")}

    def _share(self, join: tree.Join, name: str, scope: Scope) -> None:
        if join.kind in ("RIGHT", "FULL"):
            raise NotAnalysed(f"our parser does not analyse {join.kind} JOIN with USING or NATURAL")
        left = scope.shared.get(folded(name)) or self._among(list(tree.sources(join.left)), None, name)
        right = self._among(list(tree.sources(join.right)), None, name)
        if left is None or right is None:
            raise NotAnalysed(f"column {name} of USING is not in both tables")
        scope.shared[folded(name)] = left
        join.shared.append((left, right))

    def _expanded(self, output: tree.Output, scope: Scope) -> list[tree.Output]:
        if output.of is not None:
            return [output]
        found, seen = [], set()
        for source in scope.sources:
            if output.star is not None and not _is_called(source, output.star):
                continue
            for place, name in enumerate(_names_by_place(source)):
                if output.star is None and folded(name or "") in scope.shared and name is not None:
                    if folded(name) in seen:
                        continue
                    seen.add(folded(name))
                found.append(tree.Output(self._made(source, place, name), name))
        if not found:
            raise NotAnalysed("* matches no column")
        return found

    def _made(self, source: tree.Source, place: int, name: str | None) -> tree.Ref:
        column: str | int = place
        if source.table is not None:
            column = str(name)
            self.read.add((source.table.name, column))
        return tree.Ref(None, name or "", source=source, column=column)

    # --- expressions -----------------------------------------------------------------------------------------

    def _expression(self, node: Any, scope: Scope, env: Env) -> None:
        stack = [node]
        while stack:
            found = stack.pop()
            if isinstance(found, tree.Ref):
                self._ref(found, scope)
            elif isinstance(found, tree.Query):
                self.query(found, scope, env)
            else:
                stack.extend(tree.children(found))
                if is_aggregate(found):
                    self._check_aggregate(found, scope)

    def _check_aggregate(self, call: tree.Call, scope: Scope) -> None:
        """Raise NotAnalysed for an aggregate over outer columns only: SQLite evaluates it in the outer query."""
        refs = [node for arg in call.args or () for node in tree.below(arg) if isinstance(node, tree.Ref)]
        for ref in refs:
            self._ref(ref, scope)
        real = [ref for ref in refs if ref.source is not None]
        if real and not any(ref.source in scope.sources for ref in real):
            raise NotAnalysed("our parser does not analyse an aggregate of an outer query")

    def _ref(self, ref: tree.Ref, scope: Scope) -> None:
        if ref.source is not None or ref.stands_for is not None:
            return
        inner: Scope | None = scope
        while inner is not None:
            if ref.table is None and (shared := inner.shared.get(folded(ref.name))) is not None:
                ref.source, ref.column = shared.source, shared.column
                return
            found = self._among(inner.sources, ref.table, ref.name)
            if found is not None:
                ref.source, ref.column = found.source, found.column
                return
            if ref.table is None and inner.outputs is not None:
                alias = next((o for o in inner.outputs if o.name and folded(o.name) == folded(ref.name)), None)
                if alias is not None:
                    ref.stands_for = alias.of
                    return
            inner = inner.outer
        if ref.table is None and not ref.is_quoted and ref.name.lower() in ("true", "false"):
            ref.boolean = int(ref.name.lower() == "true")
            return
        raise NotAnalysed(f"the name {ref.name!r} is unknown")

    def _among(self, sources: list[tree.Source], table: str | None, name: str) -> tree.Ref | None:
        """Return the column called `name`; None if no source has one, NotAnalysed if several have one."""
        asked = [source for source in sources if table is None or _is_called(source, table)]
        found = [ref for source in asked if (ref := self._column(source, name)) is not None]
        if not found and folded(name) in ROWID_NAMES:
            found = [ref for source in asked if (ref := self._rowid(source)) is not None]
        if len(found) > 1:
            raise NotAnalysed(f"the name {name!r} means several columns")
        if not found:
            return None
        source = found[0].source
        if source is not None and source.table is not None:
            self.read.add((source.table.name, str(found[0].column)))
        return found[0]

    def _column(self, source: tree.Source, name: str) -> tree.Ref | None:
        for place, known in enumerate(_names_by_place(source)):
            if known is not None and folded(known) == folded(name):
                return tree.Ref(None, known, source=source, column=known if source.table is not None else place)
        return None

    def _rowid(self, source: tree.Source) -> tree.Ref | None:
        if source.table is None:
            return None
        key = next((c for c in source.table.columns if c.auto or c.hidden), None)
        if key is None:
            raise NotAnalysed(f"the rowid of {source.table.name!r} is not captured")
        return tree.Ref(None, key.name, source=source, column=key.name)

    def _term(self, term: tree.Term, scope: Scope, env: Env) -> None:
        outputs = scope.outputs or []
        term.output = _ordinal(term.of, len(outputs))
        if term.output is not None:
            return
        bare = term.of.of if isinstance(term.of, tree.Collate) else term.of
        if isinstance(bare, tree.Ref) and bare.table is None:
            place = next((n for n, o in enumerate(outputs) if o.name and folded(o.name) == folded(bare.name)), None)
            if place is not None and bare is term.of:
                term.output = place
                return
            if place is not None:
                bare.stands_for = outputs[place].of
                return
        self._expression(term.of, scope, env)

    def _compound_order(self, query: tree.Query) -> None:
        outputs = query.selects[0].outputs
        for term in query.order:
            term.output = _ordinal(term.of, len(outputs))
            if term.output is None and isinstance(term.of, tree.Ref) and term.of.table is None:
                name = folded(term.of.name)
                term.output = next((n for n, o in enumerate(outputs) if o.name and folded(o.name) == name), None)
            if term.output is None:
                raise NotAnalysed("our parser does not analyse ORDER BY with an expression after a set operation")


def columns_of(query: tree.Query) -> list[str | None]:
    """Return the names of a query's columns; None for a column that has only its text."""
    first = query.selects[0]
    if first.values is not None:
        return [f"column{place}" for place in range(1, len(first.outputs) + 1)]
    return [output.name for output in first.outputs]


def _renamed(names: list[str] | None, columns: list[str | None]) -> list[str | None]:
    if names is None:
        return columns
    if len(names) != len(columns):
        raise NotAnalysed("a list of column names has another length than the result")
    return list(names)


def _ordinal(node: Any, count: int) -> int | None:
    is_number = isinstance(node, tree.Literal) and node.text.isdecimal()
    return int(node.text) - 1 if is_number and 1 <= int(node.text) <= count else None


def _names_by_place(source: tree.Source) -> list[str | None]:
    if source.table is not None:
        return [column.name for column in source.table.visible]
    return source.columns[:8] if source.kind == "function" else source.columns


def _names(source: tree.Source) -> list[str]:
    return [name for name in _names_by_place(source) if name is not None]


def _is_called(source: tree.Source, name: str) -> bool:
    return folded(source.alias or source.name or "") == folded(name)


def _name_of(node: Any) -> str | None:
    if isinstance(node, tree.Ref) and node.source is not None:
        return node.name if isinstance(node.column, int) else node.column
    return None
