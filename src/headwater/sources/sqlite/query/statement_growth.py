"""Estimate of a statement's size in SQLite, which copies the columns of subqueries to each of their uses.

Nested copies grow in memory by powers of two, and SQLite limits none of it. The size is counted in tokens of the
text and is never too low: a name without a table has the size of the largest column of that name.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from headwater.errors import InvalidRequest
from headwater.sources.sqlite.query.syntax.lexer import NotAnalysed, Token, folded, name_of, tokens

MAX_NODES = 200_000  # tokens of a statement with all subquery columns copied to their uses, and opcodes of its program
MAX_COUNTED = 500_000  # characters without text literals; counting so many takes a second or two
SHORT = 2_000  # characters of a statement with one SELECT, up to which copies of outputs are not counted
PLAIN_DEPTH = 20  # depth of brackets, BETWEEN and CASE up to which copies of operands are not counted
CACHED_TEXT = 2_000  # characters of a statement whose check is cached
CACHED_VIEWS = 100
_SELECT = re.compile("select", re.IGNORECASE)
_COPYING = re.compile(r"between|case", re.IGNORECASE)
_TCL_PARAMETER = re.compile(r"[$@#:][^\s($@#:]*+\(")  # SQLite sees no text literal between such brackets
# An unclosed literal or comment extends to the end of the text, so that matching takes linear time.
_LITERALS = re.compile(
    r"""'[^']*+(?:''[^']*+)*+'|("[^"]*+(?:""[^"]*+)*+"|`[^`]*+(?:``[^`]*+)*+`|\[[^\]]*+(?:\]|\Z))|--[^\n]*+|/\*.*?(?:\*/|\Z)""",
    re.DOTALL,
)
_OPERATORS = frozenset({"CASE", "WHEN", "THEN", "ELSE", "AND", "OR", "NOT", "IN", "IS", "FROM", "BETWEEN"})
_OPERATORS |= {"LIKE", "GLOB", "REGEXP", "MATCH", "ESCAPE", "COLLATE"}
_QUOTE = re.compile("[\"'`]")
_PLAIN_NAME = re.compile(r"\w*")
_QUERIES = frozenset({"SELECT", "VALUES", "WITH"})
_ENDS_FROM = frozenset({"WHERE", "GROUP", "HAVING", "ORDER", "LIMIT", "UNION", "EXCEPT", "INTERSECT", "RETURNING"})
_BEFORE_SOURCE = frozenset({"FROM", "JOIN", ","})
_AFTER_SOURCE = frozenset({"ON", "JOIN", ","})
_AGGREGATES = frozenset({"AVG", "COUNT", "GROUP_CONCAT", "SUM", "TOTAL"})
_SOURCE_ITEMS = 6  # schema.name(arguments) AS alias
_RENAMING = frozenset({"USING", "NATURAL"})

Sizes = dict[str | tuple[str, str], int]  # sizes of columns, by folded name, and by source and name
Item = Any  # Token | Group

TOO_LARGE = f"the statement has more than {MAX_NODES} parts once SQLite has copied columns and operands to their uses"


def too_large() -> InvalidRequest:
    """Return the error for a statement that SQLite would make too large."""
    return InvalidRequest(
        TOO_LARGE,
        hint="Use each column of a subquery fewer times, nest less, or bind a long list as JSON.",
    )


def check_growth(sql: str, views: Mapping[str, str]) -> None:
    """Raise InvalidRequest for a statement that SQLite would make too large; `views` maps names to definitions."""
    if len(sql) <= CACHED_TEXT and len(views) <= CACHED_VIEWS:
        _check_cached(sql, tuple(views.items()))
    else:
        _check(sql, views)


@functools.lru_cache(maxsize=256)
def _check_cached(sql: str, views: tuple[tuple[str, str], ...]) -> None:
    """Check a statement, cached: a schema change prepares every statement again."""
    _check(sql, dict(views))


def _check(sql: str, views: Mapping[str, str]) -> None:
    bare = sql if _TCL_PARAMETER.search(sql) else _LITERALS.sub(lambda found: found[1] or " ", sql)
    text, whole = folded(bare), folded(sql)
    is_view_used = any(folded(name) in whole or _QUOTE.search(name) for name in views)
    selects = len(_SELECT.findall(bare))
    is_nested = is_view_used or selects > 1 or (selects == 1 and len(bare) > SHORT) or "window" in text
    is_copying = len(_COPYING.findall(bare)) > PLAIN_DEPTH
    if not is_nested and not is_copying:
        return
    if len(bare) > MAX_COUNTED:
        raise InvalidRequest(
            f"a statement with SELECT, BETWEEN or CASE has at most {MAX_COUNTED} characters besides its texts",
            hint="Bind long lists and values as arguments.",
        )
    try:
        found = tokens(sql)
        if is_copying and _copied(found) > MAX_NODES:
            raise too_large()
        if is_nested:
            _check_columns(_grouped(found), views, len(found))
    except NotAnalysed as error:
        raise InvalidRequest(
            f"the statement was not understood: {error}",
            hint="Correct the text at that place; name parameters by letters, digits and _ only.",
        ) from None


def _check_columns(top: Group, views: Mapping[str, str], count: int) -> None:
    limit = max(MAX_NODES, 4 * count)
    try:
        found = _Growth(views, limit).query(top, {}, None)
    except RecursionError:
        raise too_large() from None
    if found.total > limit:
        raise too_large()


class Group(msgspec.Struct):
    """The tokens between two brackets, or of the whole text."""

    items: list[Item]
    word: str = ""  # as for a token that is no word

    @property
    def is_query(self) -> bool:
        return bool(self.items) and self.items[0].word in _QUERIES


class Column(msgspec.Struct):
    """A column of a subquery: its possible names and its size. Without names SQLite generates the name."""

    names: tuple[str, ...]
    size: int


class QuerySize(msgspec.Struct):
    """Result of counting a query: its columns, its size, and the number of UNION arms it expands to."""

    columns: list[Column]
    total: int
    arms: int = 1
    is_exact: bool = True  # all columns are known, in order
    is_limited: bool = False  # a compound with LIMIT
    aliases: frozenset[str] = frozenset()  # the names it may have in FROM, and perhaps others


class Cte(msgspec.Struct):
    """A query that WITH names, and its column names."""

    names: list[str] | None
    group: Group
    is_materialized: bool  # SQLite computes its rows once and copies none of its columns


class Scope(msgspec.Struct):
    """The WITH names that a query sees."""

    ctes: dict[str, Cte]
    outer: Scope | None


def _copied(found: Sequence[Token]) -> int:
    """Return how many tokens SQLite may copy: those in operands of BETWEEN and CASE, once for each enclosing one."""
    levels, depth, total = [_Level()], 0, 0
    before: Token | None = None
    for token in found:
        level = levels[-1]
        match token.word:
            case "(":
                levels.append(_Level())
                depth += 1
            case ")" if len(levels) > 1:
                depth -= 1 + level.cases + level.betweens
                levels.pop()
            case "CASE":
                level.cases += 1
                depth += 1
            case "END" if level.cases and _ends_operand(before):
                level.cases -= 1
                depth -= 1
            case "BETWEEN":
                level.betweens += 1
                level.pending += 1
                depth += 1
            case "AND" if level.pending:
                level.pending -= 1
            case "AND" | "OR" | "," | "SELECT" | "WHEN" | "THEN" | "ELSE":
                depth -= level.betweens
                level.betweens = level.pending = 0
        total += max(depth - PLAIN_DEPTH, 0)
        before = token
    return total


class _Level(msgspec.Struct):
    """Open constructs between two brackets: CASE without END, BETWEEN in one operand, BETWEEN without AND."""

    cases: int = 0
    betweens: int = 0
    pending: int = 0


def _ends_operand(token: Token | None) -> bool:
    """Return whether END after `token` ends a CASE, rather than being a column of that name."""
    if token is None or token.kind == "op":
        return token is not None and token.word == ")"
    return token.kind != "word" or token.word not in _OPERATORS


def _grouped(found: Sequence[Token]) -> Group:
    """Return the tokens of a text as a Group, in which each pair of brackets is a nested Group."""
    top = Group([])
    stack = [top]
    for token, after in zip(found, found[1:], strict=False):
        if token.kind == "param" and after.word == "(" and after.start == token.end:
            # SQLite reads all of this as one token.
            raise NotAnalysed("our parser does not analyse a parameter with brackets")
        if token.word == "(":
            group = Group([])
            stack[-1].items.append(group)
            stack.append(group)
        elif token.word == ")":
            if len(stack) == 1:
                raise NotAnalysed("a bracket is closed that was not opened")
            stack.pop()
        else:
            stack[-1].items.append(token)
    return top


class _Growth:
    """Counter for one statement. A copy that sees other columns is counted again: the work never exceeds the size."""

    def __init__(self, views: Mapping[str, str], limit: int) -> None:
        self._views = {folded(name): sql for name, sql in views.items()}
        self._grouped_views: dict[str, Group | None] = {}
        self._limit, self._steps = limit, 0
        self._nothing: Sizes = {}
        self._counted: dict[tuple[int, int], tuple[QuerySize, Sizes]] = {}  # by the query and the columns that it sees
        self._active: set[int] = set()  # WITH names and views that are being counted

    def _step(self, count: int = 1) -> None:
        self._steps += count
        if self._steps > self._limit:
            raise too_large()

    def query(self, group: Group, outer: Sizes, scope: Scope | None) -> QuerySize:
        """Return the size of a query whose names may be columns of `outer`."""
        ctes = _ctes(group.items)
        if ctes:
            scope = Scope(ctes, scope)
        found: QuerySize | None = None
        total = 0
        for items in _cores(group.items):
            first = items[0].word if items else ""
            core = self._values(items, outer, scope) if first == "VALUES" else self._core(items, outer, scope)
            total += core.total
            if total > self._limit:
                raise too_large()
            if first in ("SELECT", "VALUES"):
                found = core if found is None else _united(found, core)
        if found is None:
            return QuerySize([], total)
        arms, is_limited = found.arms if _is_all(group.items) else 1, _is_limited(group.items)
        return msgspec.structs.replace(found, total=total, arms=arms, is_limited=is_limited)

    def _core(self, items: list[Item], outer: Sizes, scope: Scope | None) -> QuerySize:
        is_select = bool(items) and items[0].word == "SELECT"
        ends = (n for n, item in enumerate(items) if item.word in _ENDS_FROM or _is_from(items, n))
        end = next(ends, len(items))
        sources = [found for place in _sources(items) for found in self._source(items, place, outer, scope)]
        self._step(len(outer))
        sizes, is_renaming = dict(outer), any(item.word in _RENAMING for item in _flat(items))
        own: Sizes = {}
        for column in [column for source in sources for column in source.columns]:
            for name in column.names or ("",):
                before = own.get(name, 0)
                own[name] = before + column.size if is_renaming else max(before, column.size)
        for prefixes, column in [(source.aliases, column) for source in sources for column in source.columns]:
            self._step(1 + len(prefixes))
            for name in column.names or ("",):
                size = own[name] if is_renaming else column.size
                _widen(own, {(prefix, name): size for prefix in prefixes})
        _widen(sizes, own)
        columns: list[Column] = []
        is_exact, size = True, 0
        if is_select:
            for output in _split(items[1:end]):
                if output and output[-1].word == "*" and (len(output) == 1 or output[-2].word == "."):
                    starred = [column for source in sources for column in source.columns]
                    self._step(len(starred))
                    starred = [Column(c.names, max(own[name] for name in c.names or ("",))) for c in starred]
                    columns += starred
                    size += 1 + sum(column.size for column in starred)
                    is_exact = False
                    continue
                counted = self._size(output, sizes, scope)
                size += counted
                columns.append(Column(_names(output), counted))
            aliases: Sizes = {}
            for column in columns:
                for name in column.names:
                    aliases[name] = max(aliases.get(name, 0), column.size)
            _widen(sizes, aliases)
            size += _ordinals(items[end:]) * max([column.size for column in columns], default=0)
        else:
            end = 0
        size += self._size(items[end:], sizes, scope, is_clause=True)
        if uses := sum(item.word == "OVER" for item in _flat(items)):
            size += uses * self._size(_windows(items[end:]), sizes, scope)  # SQLite copies a window to each use
        arms = 1
        is_copied = not any(item.word in ("GROUP", "DISTINCT") for item in items) and not _is_aggregate(items[:end])
        for source in sources if is_copied else ():
            arms *= 1 if source.is_limited and len(sources) > 1 else source.arms
        return QuerySize(columns, size * arms + sum(source.total for source in sources), arms, is_exact)

    def _values(self, items: list[Item], outer: Sizes, scope: Scope | None) -> QuerySize:
        sizes: list[int] = []
        total = 0
        for row in items:
            if isinstance(row, Group):
                cells = [self._size(cell, outer, scope) for cell in _split(row.items)]
                total += sum(cells)
                sizes += [0] * (len(cells) - len(sizes))
                sizes = [max(old, new) for old, new in zip(sizes, cells + [0] * len(sizes), strict=False)]
            elif row.word not in ("VALUES", ","):
                total += 1
        rest = next((place for place, item in enumerate(items) if item.word not in ("VALUES", ",", "")), len(items))
        total += self._size(items[rest:], outer, scope)
        return QuerySize([Column((f"column{place}",), size) for place, size in enumerate(sizes, 1)], total)

    def _source(self, items: list[Item], place: int, outer: Sizes, scope: Scope | None) -> Iterator[QuerySize]:
        """Yield the size of each query in the source at position `place`."""
        item, aliases = items[place], _aliases(items, place)
        sizes: Iterable[QuerySize]
        if isinstance(item, Group) and item.is_query:
            sizes = [self.query(item, outer, scope)]
        elif isinstance(item, Group):
            inner = _sources(item.items, is_from=True)
            sizes = (found for start in inner for found in self._source(item.items, start, outer, scope))
        else:
            name = item
            if place + 2 < len(items) and items[place + 1].word == "." and isinstance(items[place + 2], Token):
                name = items[place + 2]
            sizes = self._named(folded(name_of(name)), outer, scope)
        for found in sizes:
            yield msgspec.structs.replace(found, aliases=found.aliases | aliases)

    def _named(self, name: str, outer: Sizes, scope: Scope | None) -> Iterator[QuerySize]:
        """Yield the size of a WITH name, and of a view of that name, which the statement may mean instead."""
        at = scope
        while at is not None and name not in at.ctes:
            at = at.outer
        if at is not None:
            cte = at.ctes[name]
            for found in self._inside(cte.group, cte.names, outer, at):
                yield _stored(found) if cte.is_materialized else found
        if name in self._views:
            if name not in self._grouped_views:
                try:
                    self._grouped_views[name] = _grouped(tokens(self._views[name]))
                except NotAnalysed:
                    self._grouped_views[name] = None
            view = self._grouped_views[name]
            if view is not None:
                yield from self._inside(view, _view_names(view), self._nothing, None)

    def _inside(self, group: Group, names: list[str] | None, outer: Sizes, scope: Scope | None) -> Iterator[QuerySize]:
        if id(group) in self._active:
            return  # a recursive query: it reads the rows it has produced so far
        key = id(group), id(outer)
        if key not in self._counted:
            self._active.add(id(group))
            try:
                self._counted[key] = self.query(group, outer, scope), outer
            finally:
                self._active.discard(id(group))
        found = self._counted[key][0]
        yield found if names is None else _renamed(found, names)

    def _size(self, items: Sequence[Item], sizes: Sizes, scope: Scope | None, *, is_clause: bool = False) -> int:
        """Return the size of items with all columns copied to their uses; sources of a clause are counted elsewhere."""
        self._step(len(items))
        skipped = set(_sources(items)) if is_clause else set()
        total = 0
        for place, item in enumerate(items):
            before = items[place - 1].word if place else ""
            if place in skipped:
                total += self._join_conditions(item, sizes, scope)
            elif isinstance(item, Group):
                if item.is_query:
                    if before in ("AS", "MATERIALIZED"):
                        continue  # a WITH name is counted where it is used
                    counted = 1 + self.query(item, sizes, scope).total
                else:
                    counted = 1 + self._size(item.items, sizes, scope)
                total += counted
            else:
                total += self._token(items, place, sizes, scope, before)
            if total > self._limit:
                raise too_large()
        return total

    def _join_conditions(self, item: Item, sizes: Sizes, scope: Scope | None) -> int:
        if isinstance(item, Group) and not item.is_query:
            return self._size([_FROM, *item.items], sizes, scope, is_clause=True)
        return 1

    def _token(self, items: Sequence[Item], place: int, sizes: Sizes, scope: Scope | None, before: str) -> int:
        token = items[place]
        if token.kind not in ("word", "quoted", "str") or before == "AS":
            return int(token.word != ",")
        name = folded(name_of(token))
        if before == "IN" or (place > 2 and before == "." and items[place - 3].word == "IN"):
            return 1 + sum(found.total for found in self._named(name, sizes, scope))
        after = items[place + 1] if place + 1 < len(items) else None
        if isinstance(after, Group) or (after is not None and after.word == "."):
            return 1  # a function or a table
        is_quoted = token.kind == "quoted" or (token.kind == "str" and before == ".")
        if is_quoted and not _PLAIN_NAME.fullmatch(name) and ("" in sizes or ":" in name):
            self._step(len(sizes))
            return max(sizes.values(), default=1)  # the name may be the text of an expression
        qualifier = items[place - 2] if before == "." and place > 1 else None
        if isinstance(qualifier, Token) and (size := sizes.get((folded(name_of(qualifier)), name))):
            return size
        return max(sizes.get(name, 1), 1)


_FROM = Token("word", "FROM", 0, 0, "FROM")


def _is_limited(items: Sequence[Item]) -> bool:
    """Return whether a query is a compound with LIMIT, which SQLite never flattens into a join."""
    words = [item.word for item in items]
    return "UNION" in words and "LIMIT" in words


def _is_all(items: Sequence[Item]) -> bool:
    """Return whether only UNION ALL joins the arms of a query: SQLite flattens no other set operation."""
    words = [item.word for item in items]
    others = any(word in ("EXCEPT", "INTERSECT") for word in words)
    return not others and all(after == "ALL" for word, after in zip(words, words[1:], strict=False) if word == "UNION")


def _is_aggregate(outputs: Sequence[Item]) -> bool:
    """Return whether a call among the outputs makes their query an aggregate, which takes no UNION arms from FROM."""
    found = list(_flat(outputs))
    calls = [(item.word, call) for item, call in zip(found, found[1:], strict=False) if isinstance(call, Group)]
    is_called = any(
        word in _AGGREGATES or (word in ("MIN", "MAX") and len(list(_split(call.items))) == 1) for word, call in calls
    )
    return is_called and not any(item.word == "OVER" for item in found)


def _ordinals(clauses: Sequence[Item]) -> int:
    """Return how many numbers in GROUP BY and ORDER BY may refer to an output."""
    start = next((place for place, item in enumerate(clauses) if item.word in ("GROUP", "ORDER")), len(clauses))
    return sum(isinstance(item, Token) and item.kind == "num" for item in _flat(clauses[start:]))


def _flat(items: Sequence[Item]) -> Iterator[Item]:
    """Yield the items, including those of joins in brackets."""
    for item in items:
        yield item
        if isinstance(item, Group) and not item.is_query:
            yield from _flat(item.items)


def _cores(items: list[Item]) -> Iterator[list[Item]]:
    """Yield the items before the first SELECT or VALUES, then each SELECT or VALUES with its clauses."""
    starts = [place for place, item in enumerate(items) if item.word in ("SELECT", "VALUES")]
    places = [0, *starts, len(items)]
    for start, end in zip(places, places[1:], strict=False):
        if start < end:
            yield items[start:end]


def _is_from(items: Sequence[Item], place: int) -> bool:
    """Return whether FROM at `place` begins a clause, and is not part of IS DISTINCT FROM."""
    return items[place].word == "FROM" and not (place and items[place - 1].word == "DISTINCT")


def _sources(items: Sequence[Item], *, is_from: bool = False) -> list[int]:
    """Return the positions of the joined sources; `is_from` if the items are a join in brackets."""
    found = []
    is_first = is_from
    for place, item in enumerate(items):
        word = item.word
        if _is_from(items, place):
            is_from = is_first = True
        elif word in _ENDS_FROM:
            is_from = is_first = False
        elif is_from and word in _BEFORE_SOURCE:
            is_first = True
        elif is_first:
            is_first = False
            if isinstance(item, Group) or item.kind in ("word", "quoted", "str"):
                found.append(place)
    return found


def _aliases(items: Sequence[Item], place: int) -> frozenset[str]:
    """Return the names that may stand for the source at `place`: those up to its condition or the next source."""
    near = itertools.takewhile(lambda item: item.word not in _AFTER_SOURCE, items[place : place + _SOURCE_ITEMS])
    names = (item for item in near if isinstance(item, Token) and item.kind in ("word", "quoted", "str"))
    return frozenset(folded(name_of(name)) for name in names)


def _windows(items: Sequence[Item]) -> list[Item]:
    """Return the definitions of a WINDOW clause."""
    return [
        item for place, item in enumerate(items) if place and isinstance(item, Group) and items[place - 1].word == "AS"
    ]


def _split(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Yield the lists of items between the commas."""
    part: list[Item] = []
    for item in items:
        if item.word == ",":
            yield part
            part = []
        else:
            part.append(item)
    yield part


def _names(output: list[Item]) -> tuple[str, ...]:
    """Return the names that a result column may have."""
    if len(output) > 1 and output[-2].word == "AS" and isinstance(output[-1], Token):
        return (folded(name_of(output[-1])),)
    names = [item for item in _flat(output) if isinstance(item, Token) and item.kind in ("word", "quoted", "str")]
    is_plain = len(output) == 1 or (len(output) == 3 and output[1].word == ".")
    if is_plain and isinstance(output[-1], Token) and names:
        return (folded(name_of(output[-1])),)
    # SQLite names the column after its last word, its only column, or its own text.
    return ("", *{folded(name_of(item)) for item in names})


def _ctes(items: list[Item]) -> dict[str, Cte]:
    """Return the names that WITH defines among the items."""
    found: dict[str, Cte] = {}
    for place, item in enumerate(items):
        if not isinstance(item, Group) or not item.is_query:
            continue
        at = place - 1
        is_materialized = False
        if at >= 0 and items[at].word == "MATERIALIZED":
            at -= 1
            is_materialized = at < 0 or items[at].word != "NOT"
            at -= not is_materialized
        if at < 1 or items[at].word != "AS":
            continue
        at -= 1
        names = None
        if isinstance(items[at], Group) and at:
            names = _listed(items[at])
            at -= 1
        name = items[at]
        if isinstance(name, Token) and name.kind in ("word", "quoted", "str"):
            found[folded(name_of(name))] = Cte(names, item, is_materialized)
    return found


def _listed(group: Group) -> list[str]:
    return [folded(name_of(part[0])) for part in _split(group.items) if part and isinstance(part[0], Token)]


def _view_names(view: Group) -> list[str] | None:
    """Return the column names that CREATE VIEW lists; None if it lists none."""
    place = next((place for place, item in enumerate(view.items) if item.word == "AS"), 0)
    before = view.items[place - 1] if place else None
    return _listed(before) if isinstance(before, Group) else None


def _united(first: QuerySize, second: QuerySize) -> QuerySize:
    """Join two arms of a UNION; the names are those of the first arm."""
    arms = first.arms + second.arms
    if first.is_exact and second.is_exact and len(first.columns) == len(second.columns):
        pairs = zip(first.columns, second.columns, strict=True)
        return QuerySize([Column(one.names, max(one.size, two.size)) for one, two in pairs], 0, arms)
    most = max((column.size for column in [*first.columns, *second.columns]), default=1)
    names = [column.names for column in [*first.columns, *second.columns]]
    return QuerySize([Column(each, most) for each in names], 0, arms, is_exact=False)


def _renamed(found: QuerySize, names: list[str]) -> QuerySize:
    if found.is_exact and len(names) == len(found.columns):
        sizes = [column.size for column in found.columns]
    else:
        sizes = [max((column.size for column in found.columns), default=1)] * len(names)
    columns = [Column((name,), size) for name, size in zip(names, sizes, strict=True)]
    return msgspec.structs.replace(found, columns=columns, is_exact=True)


def _stored(found: QuerySize) -> QuerySize:
    """Return the size of a query whose rows SQLite stores: a use of a column is a column of the stored rows."""
    columns = [Column(column.names, 1) for column in found.columns]
    return msgspec.structs.replace(found, columns=columns, arms=1)


def _widen(sizes: Sizes, more: Sizes) -> None:
    for name, size in more.items():
        sizes[name] = max(sizes.get(name, 0), size)
