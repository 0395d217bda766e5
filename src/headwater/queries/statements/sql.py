"""Execution of a caller's SQL statement, in a transaction of its own or in an open one."""

from __future__ import annotations

from collections import Counter

from headwater.database import ManagedDatabases
from headwater.errors import Busy, InvalidRequest, NotSupported
from headwater.model.database_name import real_name
from headwater.model.formats import OBJECTS, STATEMENT_FORMATS, UNSERVED_FORMATS
from headwater.model.literal import UNAVAILABLE
from headwater.model.principal import Principal
from headwater.queries.dependencies.instances import named_args
from headwater.queries.etag.causality import Token
from headwater.queries.missing_names import no_table
from headwater.queries.sql_normal_form import check_text
from headwater.queries.statements.pending_answer import PendingAnswer
from headwater.queries.statements.transactions import Transactions
from headwater.sources.query import Args, Queryable
from headwater.sources.write import Result, Session

TRIES = 3  # to run a statement while the schema changes


class Outcome(Result, frozen=True):
    """The rows of a statement and the counts of its writes."""

    causality: Token | None = None


class Statement:
    """Runs statements; the source decides whether a statement writes, not its text."""

    def __init__(self, databases: ManagedDatabases, transactions: Transactions) -> None:
        self._databases = databases
        self._transactions = transactions

    def execute(
        self,
        principal: Principal,
        sql: str,
        args: Args = (),
        *,
        db: str | None = None,
        tx: str | None = None,
        named: bool = False,
        reads: bool = False,
    ) -> Outcome | PendingAnswer[Outcome]:
        """Run one statement.

        `named` rejects rows in which two columns share a name, `reads` rejects a statement that writes.
        """
        check_text(sql, "statement")
        for value in args.values() if isinstance(args, dict) else args:
            if value is UNAVAILABLE:
                raise InvalidRequest("an argument cannot be of tag `unavailable`")
        if tx is None:
            name = real_name(db)
            principal.check_any_scope(name)
            source = self._databases.get(name)
            source.check_sql(principal.role)
            if principal.tables(name) is not None:
                return _outcome(_read_in_scope(principal, name, source, sql, args), None, named)
            try:
                source.check_sql(principal.role, sql, args)
                if source.is_read_only(sql, args, role=principal.role):
                    read = source.read(sql, args, role=principal.role)
                    return _outcome(Result(read.columns, read.rows, truncated=read.truncated), None, named)
            except InvalidRequest as error:
                if error.missing_table:
                    raise no_table(error, principal, name, source.describe()) from None
                raise

        else:
            held = self._transactions.check(principal, tx, db)
            principal.check(held)  # before the statement is parsed: its errors would show which tables exist
            self._databases.get(held).check_sql(principal.role, sql, args)

        def work(name: str, session: Session) -> Result:
            principal.check(name)  # the tables that a statement writes are not known before it runs
            if reads and not session.is_read_only(sql):
                raise InvalidRequest("the statement writes, and a query may only read", hint="Use sql.exec to write.")
            result = session.execute(sql, args)
            _check(result, named)
            return result

        return self._transactions.write(principal, db, tx, work, lambda result, seen: _outcome(result, seen, named))


def _read_in_scope(principal: Principal, db: str, source: Queryable, sql: str, args: Args) -> Result:
    """Run a SELECT of a caller restricted to tables: exactly the text that was analysed, with the same login.

    Raise Forbidden, with the same message, for a statement that writes, is not a SELECT, or reads other tables.
    """
    for _ in range(TRIES):
        with principal.understanding(db):
            source.check_sql(principal.role, sql, args)
            analysis = source.analyse(sql)
            principal.check_reads(db, analysis)
        read = source.answer(analysis, named_args(analysis.parameters, args))
        if read is not None:
            return Result(read.columns, read.rows, truncated=read.truncated)
    raise Busy("the schema keeps changing", hint="Retry in a moment.")


def check_format(name: str | None) -> bool:
    """Return whether `name` makes rows objects, not arrays; NotSupported or InvalidRequest for other formats."""
    if name in UNSERVED_FORMATS:
        raise NotSupported(
            f"result_format {name!r} is not supported", hint=f"Use one of {', '.join(STATEMENT_FORMATS)}."
        )
    if name is not None and name not in STATEMENT_FORMATS:
        raise InvalidRequest(f"unknown result_format {name!r}", hint=f"Use one of {', '.join(STATEMENT_FORMATS)}.")
    return name == OBJECTS


def _outcome(result: Result, seen: Token | None, named: bool) -> Outcome:
    _check(result, named)
    return Outcome(result.columns, result.rows, result.affected, result.last_insert_id, result.truncated, seen)


def _check(result: Result, named: bool) -> None:
    """Reject duplicate names; called inside the transaction, so that a rejected statement is rolled back."""
    twice = [name for name, count in Counter(result.columns).items() if count > 1] if named else []
    if twice:
        raise InvalidRequest(
            f"two columns are called {twice[0]!r}; an object can hold only one",
            hint='Give them different names with AS, or use the format "rows_json".',
        )
