"""Rendering of a tree as SQL: every name qualified by the source it resolved to, every operator in parentheses.

SQLite then checks that this text and the caller's compile to the same program, so rendering must keep the meaning.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headwater.sources.sqlite.connection import ident
from headwater.sources.sqlite.query.syntax import tree
from headwater.sources.sqlite.query.syntax.lexer import NotAnalysed


def render(query: tree.Query) -> str:
    """Return the text of a resolved query."""
    text = _with(query) + _select(query.selects[0])
    for op, select in zip(query.ops, query.selects[1:], strict=True):
        text += f" {op} {_select(select)}"
    if query.order:
        text += f" ORDER BY {_terms(query.order)}"
    return text + _clause(" LIMIT", query.limit) + _clause(" OFFSET", query.offset)


def _clause(word: str, node: Any) -> str:
    """Return a clause with an expression; "" if there is none."""
    return "" if node is None else f"{word} {expression(node)}"


def _with(query: tree.Query) -> str:
    if not query.ctes:
        return ""
    parts = []
    for cte in query.ctes:
        names = f"({', '.join(map(ident, cte.columns))})" if cte.columns else ""
        parts.append(f"{ident(cte.name)}{names} AS {cte.hint} ({render(cte.query)})")
    return f"WITH {'RECURSIVE ' if query.recursive else ''}{', '.join(parts)} "


def _select(select: tree.Select) -> str:
    if select.values is not None:
        return "VALUES " + ", ".join(f"({_list(row)})" for row in select.values)
    outputs = (
        expression(output.of) + (f" AS {ident(output.name)}" if output.name is not None else "")
        for output in select.outputs
    )
    text = f"SELECT {'DISTINCT ' if select.distinct else ''}{', '.join(outputs)}"
    if select.source is not None:
        text += f" FROM {_from(select.source)}"
    text += _clause(" WHERE", select.where)
    if select.group:
        text += f" GROUP BY {_list(select.group)}"
    text += _clause(" HAVING", select.having)
    if select.windows:
        text += " WINDOW " + ", ".join(f"{ident(name)} AS {_window(window)}" for name, window in select.windows)
    return text


def _from(node: tree.From) -> str:
    if isinstance(node, tree.Join):
        text = f"{_from(node.left)} {node.words} {_from(node.right)}{_clause(' ON', node.on)}"
        if node.using is not None:
            text += f" USING ({', '.join(map(ident, node.using))})"
        return f"({text})" if node.is_group else text
    if node.name is None and node.query is not None:
        return f"({render(node.query)}) AS {ident(node.label)}"
    args = f"({_list(node.args)})" if node.args is not None else ""
    schema = "main." if node.kind in ("table", "view") else ""
    return f"{schema}{ident(node.name or '')}{args} AS {ident(node.label)} {node.hint}"


def _terms(terms: Iterable[tree.Term]) -> str:
    return ", ".join(
        (str(term.output + 1) if term.output is not None else expression(term.of))
        + (" DESC" if term.descends else "")
        + (f" NULLS {term.nulls}" if term.nulls else "")
        for term in terms
    )


def _list(items: Iterable[Any]) -> str:
    return ", ".join(map(expression, items))


def _ref(node: tree.Ref) -> str:
    if node.stands_for is not None:
        return expression(node.stands_for)
    if node.source is None:
        return ident(node.name) if node.boolean is None else node.name
    if isinstance(node.column, int):
        name = node.source.columns[node.column]
        if name is None:
            raise NotAnalysed("a column has no name")
        return f"{ident(node.source.label)}.{ident(name)}"
    return f"{ident(node.source.label)}.{ident(node.name if node.column == '' else node.column)}"


def expression(node: Any) -> str:
    """Return an expression of the tree as SQL; NotAnalysed for an unknown node."""
    match node:
        case tree.Ref():
            return _ref(node)
        case tree.Literal():
            return node.text
        case tree.Bind():
            return f"?{node.slot}" if node.text == "?" else node.text
        case tree.Unary():
            return f"({node.op} {expression(node.of)})"
        case tree.Binary():
            return f"({expression(node.left)} {node.op} {expression(node.right)}{_clause(' ESCAPE', node.escape)})"
        case tree.Chain():
            return f"({f' {node.op} '.join(map(expression, node.parts))})"
        case tree.Between():
            word = "NOT BETWEEN" if node.negated else "BETWEEN"
            return f"({expression(node.of)} {word} {expression(node.low)} AND {expression(node.high)})"
        case tree.In():
            inside = render(node.query) if node.query is not None else _list(node.items or [])
            return f"({expression(node.of)} {'NOT IN' if node.negated else 'IN'} ({inside}))"
        case tree.Null():
            return f"({expression(node.of)} {node.word})"
        case tree.Collate():
            return f"({expression(node.of)} COLLATE {ident(node.name)})"
        case tree.Cast():
            return f"CAST({expression(node.of)} AS {node.type})"
        case tree.Row():
            return f"({_list(node.items)})"
        case tree.Subquery():
            return f"{'EXISTS ' if node.exists else ''}({render(node.query)})"
        case tree.Case():
            whens = "".join(f" WHEN {expression(when)} THEN {expression(then)}" for when, then in node.whens)
            return f"{_clause('CASE', node.base) or 'CASE'}{whens}{_clause(' ELSE', node.otherwise)} END"
        case tree.Call():
            return _call(node)
    raise NotAnalysed(f"{type(node).__name__} cannot be written")


def _call(node: tree.Call) -> str:
    if node.bare:
        return node.name
    text = "*" if node.args is None else ("DISTINCT " if node.distinct else "") + _list(node.args)
    if node.order:
        text += f" ORDER BY {_terms(node.order)}"
    text = f"{ident(node.name)}({text})"
    if node.where is not None:
        text += f" FILTER (WHERE {expression(node.where)})"
    if node.over is not None:
        text += f" OVER {ident(node.over) if isinstance(node.over, str) else _window(node.over)}"
    return text


def _window(window: tree.Window) -> str:
    parts = [ident(window.base)] if window.base is not None else []
    if window.partition:
        parts.append(f"PARTITION BY {_list(window.partition)}")
    if window.order:
        parts.append(f"ORDER BY {_terms(window.order)}")
    parts += [part if isinstance(part, str) else expression(part) for part in window.frame]
    return f"({' '.join(parts)})"
