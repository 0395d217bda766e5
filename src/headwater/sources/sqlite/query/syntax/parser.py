"""Parser of SELECT by SQLite's own grammar. Unknown syntax raises NotAnalysed; nothing is guessed."""

from __future__ import annotations

from typing import Any

from headwater.sources.sqlite.connection import ident
from headwater.sources.sqlite.query.syntax import tree
from headwater.sources.sqlite.query.syntax.expressions import MAX_DEPTH, RESERVED, Expressions
from headwater.sources.sqlite.query.syntax.lexer import NotAnalysed

MAX_TEXT = 100_000
_FRAME = {"ROWS", "RANGE", "GROUPS"}
_JOIN_WORDS = {"NATURAL", "LEFT", "RIGHT", "FULL", "OUTER", "INNER", "CROSS", "JOIN"}
_KINDS = {
    **dict.fromkeys(("JOIN", "INNER JOIN", "CROSS JOIN"), ""),
    **{f"{side}{outer} JOIN": side for side in ("LEFT", "RIGHT", "FULL") for outer in ("", " OUTER")},
}
_ENDS_SOURCE = RESERVED | {"INDEXED", "LIMIT", "OFFSET"}


def parse(sql: str) -> tree.Query:
    """Return the tree of one SELECT; raise NotAnalysed for anything else."""
    if len(sql) > MAX_TEXT:
        raise NotAnalysed(f"the statement is longer than {MAX_TEXT} characters")
    reader = _Parser(sql)
    found = reader.query()
    reader.finish()
    return found


def parse_expression(sql: str) -> Any:
    """Return the tree of one expression, in linear time; raise NotAnalysed for anything else."""
    if len(sql) > MAX_TEXT:
        raise NotAnalysed(f"the expression is longer than {MAX_TEXT} characters")
    reader = _Parser(sql)
    found = reader.expression()
    if reader.next.kind != "end":
        raise NotAnalysed(f"unknown text at {reader.next.text[:40]!r}")
    return found


def parse_view(sql: str) -> tuple[list[str] | None, tree.Query, str]:
    """Return the column names, the query and its text of a CREATE VIEW statement."""
    reader = _Parser(sql)
    for word in ("CREATE", "VIEW"):
        reader.takes("TEMP") or reader.takes("TEMPORARY")
        reader.need(word)
    reader.takes("IF", "NOT", "EXISTS")
    reader.name()
    if reader.takes("."):
        reader.name()
    columns = reader.names() if reader.next.word == "(" else None
    reader.need("AS")
    start = reader.next.start
    query = reader.query()
    end = reader.last_end
    reader.finish()
    return columns, query, sql[start:end]


class _Parser(Expressions):
    def finish(self) -> None:
        """Consume semicolons; raise NotAnalysed if anything else follows."""
        while self.takes(";"):
            pass
        if self.next.kind != "end":
            raise NotAnalysed(f"unknown text at {self.next.text[:40]!r}")

    def query(self) -> tree.Query:
        """Parse [WITH …] SELECT … [UNION …] [ORDER BY …] [LIMIT …]."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotAnalysed(f"queries are nested deeper than {MAX_DEPTH}")
        ctes, recursive = self._with()
        found = tree.Query([self._core()], [], ctes, recursive)
        while (op := self._compound()) is not None:
            found.ops.append(op)
            found.selects.append(self._core())
        found.body_end = self.last_end
        if self.takes("ORDER", "BY"):
            found.order = self.terms()
        if self.takes("LIMIT"):
            found.limit = self.expression()
            if self.takes("OFFSET"):
                found.offset = self.expression()
            elif self.takes(","):
                found.limit, found.offset = self.expression(), found.limit
        self._depth -= 1
        return found

    def _with(self) -> tuple[list[tree.Cte], bool]:
        if not self.takes("WITH"):
            return [], False
        recursive = self.takes("RECURSIVE")
        return self.separated(self._cte), recursive

    def _cte(self) -> tree.Cte:
        name = self.name()
        columns = self.names() if self.next.word == "(" else None
        self.need("AS")
        hint = ""
        if self.takes("NOT", "MATERIALIZED"):
            hint = "NOT MATERIALIZED"
        elif self.takes("MATERIALIZED"):
            hint = "MATERIALIZED"
        return tree.Cte(name, columns, self.bracketed(self.query), hint)

    def names(self) -> list[str]:
        """Parse names in brackets, separated by commas; return them."""
        return self.bracketed(lambda: self.separated(self.name))

    def _compound(self) -> str | None:
        for words in (("UNION", "ALL"), ("UNION",), ("EXCEPT",), ("INTERSECT",)):
            if self.takes(*words):
                return " ".join(words)
        return None

    def _core(self) -> tree.Select:
        if self.takes("VALUES"):
            rows = self.separated(lambda: self.bracketed(self.items))
            return tree.Select([tree.Output(of, None) for of in rows[0]], values=rows)
        self.need("SELECT")
        distinct = self.takes("DISTINCT")
        if not distinct:
            self.takes("ALL")
        found = tree.Select(self.separated(self._output), distinct)
        if self.takes("FROM"):
            found.source = self._from()
        if self.takes("WHERE"):
            found.where = self.expression()
        if self.takes("GROUP", "BY"):
            found.group = self.items()
        if self.takes("HAVING"):
            found.having = self.expression()
        if self.takes("WINDOW"):
            found.windows = self.separated(self._named_window)
        return found

    def _output(self) -> tree.Output:
        if self.takes("*"):
            return tree.Output(None, None)
        if self.ahead(1).word == "." and self.ahead(2).word == "*":
            table = self.name()
            self._at += 2
            return tree.Output(None, None, table)
        return tree.Output(self.expression(), self._alias())

    def _is_alias(self) -> bool:
        token = self.next
        return token.kind in ("quoted", "str") or (token.kind == "word" and token.word not in _ENDS_SOURCE)

    # --- FROM ------------------------------------------------------------------------------------------------

    def _from(self) -> tree.From:
        found = self._source()
        while True:
            if self.takes(","):
                words, kind, natural = ",", "", False
            elif self.next.word in _JOIN_WORDS:
                words, kind, natural = self._join_words()
            else:
                return found
            join = tree.Join(found, self._source(), kind, words, natural)
            if self.takes("ON"):
                join.on = self.expression()
            elif self.takes("USING"):
                join.using = self.names()
            found = join

    def _join_words(self) -> tuple[str, str, bool]:
        words = []
        while self.next.word in _JOIN_WORDS:
            words.append(self.advance().word)
            if words[-1] == "JOIN":
                break
        natural = "NATURAL" in words
        kind = _KINDS.get(" ".join(word for word in words if word != "NATURAL"))
        if kind is None:
            raise NotAnalysed(f"unknown join type {' '.join(words)}")
        return " ".join(words), kind, natural

    def _source(self) -> tree.From:
        if self.is_query_next():
            query = self.bracketed(self.query)
            return tree.Source(None, self._alias(), query)
        if self.takes("("):
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise NotAnalysed(f"joins are nested deeper than {MAX_DEPTH}")
            found = self._from()
            self._depth -= 1
            self.need(")")
            if self.next.word == "AS" or self._is_alias():
                raise NotAnalysed("our parser does not analyse an alias of a join in brackets")
            if isinstance(found, tree.Join):
                found.is_group = True
            return found
        return self._named()

    def _named(self) -> tree.Source:
        name, is_main = self.name(), False
        if self.takes("."):
            if name.lower() != "main":
                raise NotAnalysed("the query names a table of another schema")
            name, is_main = self.name(), True
        args = self.arguments() if self.next.word == "(" else None
        found = tree.Source(name, self._alias(), args=args, is_main=is_main)
        if self.takes("INDEXED", "BY"):
            found.hint = f"INDEXED BY {ident(self.name())}"
        elif self.takes("NOT", "INDEXED"):
            found.hint = "NOT INDEXED"
        return found

    def _alias(self) -> str | None:
        if self.takes("AS"):
            return self.name()
        return self.name() if self._is_alias() else None

    def table_as_query(self) -> tree.Query:
        source = self._named()
        if source.args is not None or source.alias is not None:
            raise NotAnalysed("our parser does not analyse IN with a table-valued function")
        return tree.Query([tree.Select([tree.Output(None, None)], source=source)], [])

    # --- ORDER BY and windows --------------------------------------------------------------------------------

    def terms(self) -> list[tree.Term]:
        return self.separated(self._term)

    def _term(self) -> tree.Term:
        found = tree.Term(self.expression())
        if self.takes("DESC"):
            found.descends = True
        else:
            self.takes("ASC")
        if self.takes("NULLS"):
            found.nulls = self.advance().word
            if found.nulls not in ("FIRST", "LAST"):
                raise NotAnalysed("NULLS is not followed by FIRST or LAST")
        found.end = self.last_end
        return found

    def _named_window(self) -> tuple[str, tree.Window]:
        name = self.name()
        self.need("AS")
        return name, self.window()

    def window(self) -> tree.Window:
        """Parse ( [base] [PARTITION BY …] [ORDER BY …] [frame] )."""
        self.need("(")
        base = None
        if self.next.kind in ("word", "quoted") and self.next.word not in {"PARTITION", "ORDER", *_FRAME}:
            base = self.name()
        partition = self.items() if self.takes("PARTITION", "BY") else []
        order = self.terms() if self.takes("ORDER", "BY") else []
        frame: list[Any] = []
        while self.next.word != ")":
            frame.append(self._frame_part())
        self.need(")")
        return tree.Window(base, partition, order, frame)

    def _frame_part(self) -> Any:
        words = {"BETWEEN", "AND", "UNBOUNDED", "PRECEDING", "FOLLOWING", "CURRENT", "ROW", "EXCLUDE", "NO", "OTHERS"}
        if self.next.word in words | _FRAME | {"GROUP", "TIES"}:
            return self.advance().word
        if self.next.kind not in ("num", "param"):
            raise NotAnalysed("our parser does not analyse this window frame")
        return self._primary()
