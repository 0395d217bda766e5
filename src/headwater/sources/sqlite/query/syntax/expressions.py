"""Parser of SQLite's expressions: operators by precedence, and primary expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from headwater.sources.sqlite.query.syntax import tree
from headwater.sources.sqlite.query.syntax.lexer import NotAnalysed, Token, name_of, tokens, unquoted

T = TypeVar("T")
_EQUALITY = {"=", "==", "!=", "<>"}
_ORDER = {"<", "<=", ">", ">="}
_LEFT: tuple[set[str], ...] = ({"&", "|", "<<", ">>"}, {"+", "-"}, {"*", "/", "%"}, {"||", "->", "->>"})
_PATTERN = {"LIKE", "GLOB", "REGEXP", "MATCH"}
_CLOCKS = {"CURRENT_TIMESTAMP", "CURRENT_DATE", "CURRENT_TIME"}
# Words that end an expression or an operand; unquoted, they are never a column name.
_WORDS = """
ALL AND AS BETWEEN CASE COLLATE CREATE DEFAULT DISTINCT ELSE ESCAPE EXCEPT EXISTS FROM GROUP HAVING IN INDEXED
INTERSECT INTO IS ISNULL JOIN LIMIT NOT NOTNULL NULL ON OR ORDER SELECT SET TABLE THEN TO UNION UNIQUE USING VALUES
WHEN WHERE CAST CROSS INNER LEFT RIGHT FULL OUTER NATURAL WINDOW
"""
RESERVED = frozenset(_WORDS.split())
MAX_DEPTH = 80


class Expressions:
    """Parser of expressions over tokens. The subclass parses the queries inside expressions."""

    def __init__(self, sql: str) -> None:
        self._tokens = tokens(sql)
        self._at = 0
        self._depth = 0

    # --- tokens ----------------------------------------------------------------------------------------------

    @property
    def next(self) -> Token:
        """Return the next token without consuming it."""
        return self._tokens[self._at]

    def ahead(self, count: int) -> Token:
        """Return the token `count` positions ahead, without consuming it."""
        return self._tokens[min(self._at + count, len(self._tokens) - 1)]

    def advance(self) -> Token:
        """Consume and return the next token."""
        token = self._tokens[self._at]
        self._at += 1
        return token

    def takes(self, *words: str) -> bool:
        """Consume these words if they follow; return whether they did."""
        if all(self.ahead(place).word == word for place, word in enumerate(words)):
            self._at += len(words)
            return True
        return False

    def need(self, word: str) -> Token:
        """Consume `word`; raise NotAnalysed if another token follows."""
        if self.next.word != word:
            raise NotAnalysed(f"{word} is expected at {self.next.text[:40]!r}")
        return self.advance()

    def name(self) -> str:
        """Consume and return a name without its quotes; NotAnalysed if none follows."""
        token = self.advance()
        if token.kind not in ("word", "quoted", "str") or (token.kind == "word" and token.word in RESERVED):
            raise NotAnalysed(f"a name is expected at {token.text[:40]!r}")
        return name_of(token)

    @property
    def last_end(self) -> int:
        """Return the end position of the last consumed token."""
        return self._tokens[self._at - 1].end

    # --- operators -------------------------------------------------------------------------------------------

    def expression(self) -> Any:
        """Parse an expression and return its tree; NotAnalysed if the text is not one."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotAnalysed(f"expressions are nested deeper than {MAX_DEPTH}")
        try:
            return self._chain("OR", lambda: self._chain("AND", self._negation))
        finally:
            self._depth -= 1

    def _chain(self, op: str, part: Callable[[], Any]) -> Any:
        parts = [part()]
        while self.takes(op):
            parts.append(part())
        return parts[0] if len(parts) == 1 else tree.Chain(op, parts)

    def _negation(self) -> Any:
        count = 0
        while self.next.word == "NOT":
            self.advance()
            count += 1
        found = self._equality()
        if count > MAX_DEPTH:
            raise NotAnalysed("too many NOT")
        for _ in range(count):
            found = tree.Unary("NOT", found)
        return found

    def _equality(self) -> Any:
        left = self._order()
        while True:
            word = self.next.word
            if word in _EQUALITY:
                self.advance()
                left = tree.Binary(word, left, self._order())
            elif word == "IS":
                left = self._is(left)
            elif word in ("ISNULL", "NOTNULL"):
                self.advance()
                left = tree.Null(left, word == "NOTNULL", word)
            elif word == "NOT" and self.ahead(1).word == "NULL":
                self._at += 2
                left = tree.Null(left, True, "NOT NULL")
            elif (tested := self._test(left)) is not None:
                left = tested
            else:
                return left

    def _is(self, left: Any) -> Any:
        self.advance()
        op = "IS NOT" if self.takes("NOT") else "IS"
        if self.takes("DISTINCT", "FROM"):
            op = "IS" if op == "IS NOT" else "IS NOT"
        return tree.Binary(op, left, self._order())

    def _test(self, left: Any) -> Any:
        """Parse BETWEEN, IN, LIKE or similar after `left`; return None if none follows."""
        negated = self.next.word == "NOT"
        word = self.ahead(1).word if negated else self.next.word
        if word != "BETWEEN" and word != "IN" and word not in _PATTERN:
            return None
        self._at += 1 + negated
        if word == "BETWEEN":
            low = self._order()
            self.need("AND")
            return tree.Between(left, low, self._order(), negated)
        if word == "IN":
            return self._in(left, negated)
        right = self._order()
        escape = self._order() if self.takes("ESCAPE") else None
        return tree.Binary(f"NOT {word}" if negated else word, left, right, escape)

    def _in(self, left: Any, negated: bool) -> Any:
        if self.next.word != "(":
            return tree.In(left, negated, query=self.table_as_query())
        if self.is_query_next():
            return tree.In(left, negated, query=self.bracketed(self.query))
        return tree.In(left, negated, items=self.arguments())

    def _order(self) -> Any:
        left = self._level(0)
        while self.next.word in _ORDER:
            op = self.advance().word
            left = tree.Binary(op, left, self._level(0))
        return left

    def _level(self, level: int) -> Any:
        if level == len(_LEFT):
            return self._collated()
        left = self._level(level + 1)
        while self.next.kind == "op" and self.next.word in _LEFT[level]:
            op = self.advance().word
            left = tree.Binary(op, left, self._level(level + 1))
        return left

    def _collated(self) -> Any:
        found = self._prefixed()
        while self.takes("COLLATE"):
            found = tree.Collate(found, self.name())
        return found

    def _prefixed(self) -> Any:
        ops = []
        while self.next.kind == "op" and self.next.word in ("-", "+", "~"):
            ops.append(self.advance().word)
        if len(ops) > MAX_DEPTH:
            raise NotAnalysed("too many signs")
        found = self._primary()
        for op in reversed(ops):
            found = tree.Unary(op, found)
        return found

    def items(self) -> list[Any]:
        """Parse expressions separated by commas; return their trees."""
        return self.separated(self.expression)

    def separated(self, part: Callable[[], T]) -> list[T]:
        """Parse parts separated by commas, each by `part`; return them."""
        found = [part()]
        while self.takes(","):
            found.append(part())
        return found

    def bracketed(self, part: Callable[[], T]) -> T:
        """Parse a part in brackets by `part`; return it."""
        self.need("(")
        found = part()
        self.need(")")
        return found

    def is_query_next(self) -> bool:
        """Return whether a query in brackets follows."""
        return self.next.word == "(" and self.ahead(1).word in ("SELECT", "VALUES", "WITH")

    def arguments(self) -> list[Any]:
        """Parse expressions in brackets; there may be none."""
        return self.bracketed(lambda: [] if self.next.word == ")" else self.items())

    # --- primary expressions ---------------------------------------------------------------------------------

    def _primary(self) -> Any:
        token = self.next
        if token.kind in ("str", "num", "blob"):
            self.advance()
            if self.next.kind == "str" and token.kind == "str":
                raise NotAnalysed("two strings follow each other")
            return tree.Literal(token.text)
        if token.kind == "param":
            self.advance()
            return tree.Bind(token.slot, token.text)
        if token.word == "(":
            return self._parenthesis()
        if token.kind == "word":
            return self._word(token)
        if token.kind == "quoted":
            return self._column()
        raise NotAnalysed(f"an expression is expected at {token.text[:40]!r}")

    def _parenthesis(self) -> Any:
        if self.is_query_next():
            return tree.Subquery(self.bracketed(self.query))
        items = self.bracketed(self.items)
        return items[0] if len(items) == 1 else tree.Row(items)

    def _word(self, token: Token) -> Any:
        match token.word:
            case "NULL":
                self.advance()
                return tree.Literal("NULL")
            case "CASE":
                return self._case()
            case "CAST":
                return self._cast()
            case "EXISTS" if self.ahead(1).word == "(":
                self.advance()
                return tree.Subquery(self.bracketed(self.query), exists=True)
            case "RAISE":
                raise NotAnalysed("our parser does not analyse RAISE")
        if token.word in _CLOCKS:
            self.advance()
            return tree.Call(token.word, [], bare=True)
        if self.ahead(1).word == "(" and (token.word not in RESERVED or token.word in ("LEFT", "RIGHT")):
            return self._call()
        return self._column()

    def _column(self) -> Any:
        is_quoted = self.next.kind == "quoted"
        parts = [self.name()]
        while self.takes("."):
            parts.append(self.name())
        if is_quoted and len(parts) == 1 and self.next.word == "(":
            self._at -= 1
            return self._call()
        if len(parts) == 3 and parts[0].lower() == "main":
            parts = parts[1:]
        if len(parts) > 2:
            raise NotAnalysed("the query names a column of another schema")
        return tree.Ref(parts[0] if len(parts) == 2 else None, parts[-1], is_quoted)

    def _case(self) -> Any:
        self.need("CASE")
        base = None if self.next.word == "WHEN" else self.expression()
        whens = []
        while self.takes("WHEN"):
            when = self.expression()
            self.need("THEN")
            whens.append((when, self.expression()))
        otherwise = self.expression() if self.takes("ELSE") else None
        self.need("END")
        return tree.Case(base, whens, otherwise)

    def _cast(self) -> Any:
        self.advance()
        self.need("(")
        of = self.expression()
        self.need("AS")
        words: list[str] = []
        while self.next.word != ")" or words.count("(") > words.count(")"):
            if self.next.kind in ("end", "str", "param"):
                raise NotAnalysed("our parser does not analyse the type of this CAST")
            token = self.advance()
            words.append(token.text)
        self.need(")")
        return tree.Cast(of, " ".join(words))

    def _call(self) -> Any:
        found = tree.Call(unquoted(self.advance()), [])
        self.need("(")
        if self.takes("*"):
            found.args = None
        elif self.next.word != ")":
            found.distinct = self.takes("DISTINCT") or (self.takes("ALL") and False)
            found.args = self.items()
            if self.takes("ORDER", "BY"):
                found.order = self.terms()
        self.need(")")
        if self.next.word == "WITHIN":
            raise NotAnalysed("our parser does not analyse WITHIN GROUP")
        if self.next.word == "FILTER" and self.ahead(1).word == "(":
            self._at += 2
            self.need("WHERE")
            found.where = self.expression()
            self.need(")")
        if self.next.word == "OVER" and (self.ahead(1).word == "(" or self.ahead(1).kind in ("word", "quoted")):
            self.advance()
            found.over = self.window() if self.next.word == "(" else self.name()
        return found

    # --- parsed by the subclass ------------------------------------------------------------------------------

    def query(self) -> tree.Query:
        """Parse a whole query and return its tree; implemented by the subclass."""
        raise NotImplementedError

    def table_as_query(self) -> tree.Query:
        """Parse a table name after IN as the query that it denotes."""
        raise NotImplementedError

    def terms(self) -> list[tree.Term]:
        """Parse the terms after ORDER BY; implemented by the subclass."""
        raise NotImplementedError

    def window(self) -> tree.Window:
        """Parse the window in brackets after OVER; implemented by the subclass."""
        raise NotImplementedError
