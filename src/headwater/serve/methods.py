"""METHODS: every RPC method as data, with what it takes, who may call it and what it does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headwater import __version__
from headwater.errors import HeadwaterError, InvalidRequest, NotSupported
from headwater.model.database import real_name
from headwater.model.literal import Value, from_json
from headwater.model.predicate import Expr, parse_expr
from headwater.model.principal import Principal
from headwater.queries.etag import one_tag
from headwater.queries.pending import Pending
from headwater.queries.rows import Place
from headwater.queries.statement import check_format
from headwater.queries.transactions import one_tx
from headwater.serve import answers, params
from headwater.serve.api import Api
from headwater.serve.tables import table_of

READ, WRITE, OWN = "reader", "writer", "owner"
RANK = {READ: 1, WRITE: 2, OWN: 3}


@dataclass(frozen=True)
class Method:
    """One method. A `blocking` one runs in a thread; the others only hand work to the writer."""

    name: str
    params: type[params.Params]
    call: Callable[[Api, Principal, Any], Any]
    role: str
    summary: str
    blocking: bool = False


def _then(result: Any, step: Callable[[Any], Any]) -> Any:
    return result.then(step) if isinstance(result, Pending) else step(result)


def _place(name: params.TableName) -> Place:
    return Place(name.table, name.db)


def _value(body: Any, path: str) -> Value:
    try:
        return from_json(body)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error.message}", hint=error.hint) from None


def _values(bodies: list[Any], path: str) -> list[Value]:
    return [_value(body, f"{path}[{place}]") for place, body in enumerate(bodies)]


def _columns(bodies: dict[str, Any], path: str) -> dict[str, Value]:
    return {name: _value(body, f"{path}.{name}") for name, body in bodies.items()}


def _where(p: params.Update | params.Delete) -> Expr:
    return parse_expr(p.where, args=_values(p.args, "args"))


# --- system ----------------------------------------------------------------------------------------------


def _ping(api: Api, who: Principal, p: params.Nothing) -> Any:
    return {"pong": True, "time_unix_ms": time.time_ns() // 1_000_000}


def _version(api: Api, who: Principal, p: params.Nothing) -> Any:
    return {"name": "headwater", "version": __version__, "skeinql": "1.0"}


def _capabilities(api: Api, who: Principal, p: params.Nothing) -> Any:
    absent = ("mysql_compat", "etag_queries", "causal_etags", "wasm_udf", "wasm_operators")
    return {
        "name": "headwater",
        "skeinql": True,
        **dict.fromkeys((*absent, "column_snapshots", "audit_wal", "cluster"), False),
        "methods": sorted(METHODS),
        "hash": {"canonicalization": "RFC8785", "algorithm": "SHA-256", "encoding": "base32"},
        "wire": {"skeinpack_v1": False},
    }


def _stats(api: Api, who: Principal, p: params.MaybeDatabase) -> Any:
    return api.stats.snapshot(who, p.db)


# --- data ------------------------------------------------------------------------------------------------


def _get(api: Api, who: Principal, p: params.Get) -> Any:
    answers.check_row_format(p.format)
    found = api.rows.get(who, _place(p.table), _values(p.pk, "pk"), tx=p.tx)
    return _then(found, lambda result: answers.found(result, p.format))


def _insert(api: Api, who: Principal, p: params.Insert) -> Any:
    rows = [_columns(row, f"rows[{place}]") for place, row in enumerate(p.rows)]
    return api.rows.insert(who, _place(p.into), rows, returning=p.returning, tx=p.tx).then(answers.stored)


def _update(api: Api, who: Principal, p: params.Update) -> Any:
    tag = one_tag(p.if_match, p.expected_etag)
    values = _columns(p.set, "set")
    pending = api.rows.update(who, _place(p.table), _where(p), values, limit=p.limit, if_match=tag, tx=p.tx)
    return pending.then(answers.stored)


def _delete(api: Api, who: Principal, p: params.Delete) -> Any:
    tag = one_tag(p.if_match, p.expected_etag)
    pending = api.rows.delete(who, _place(p.table), _where(p), limit=p.limit, if_match=tag, tx=p.tx)
    return pending.then(answers.stored)


def _sql(api: Api, who: Principal, p: params.SqlExec) -> Any:
    as_objects = check_format(p.result_format)
    if p.db is not None and p.default_db is not None and real_name(p.db) != real_name(p.default_db):
        raise InvalidRequest("`db` and `default_db` name different databases", hint="Send one of them.")
    args = _columns(p.args, "args") if isinstance(p.args, dict) else _values(p.args, "args")
    db = p.db if p.db is not None else p.default_db
    result = api.statement.execute(who, p.sql, args, db=db, tx=p.tx, named=as_objects)
    return _then(result, lambda outcome: answers.outcome(outcome, as_objects))


# --- transactions and schema -----------------------------------------------------------------------------


def _begin(api: Api, who: Principal, p: params.Begin) -> Any:
    return answers.begun(api.transactions.begin(who, db=p.db, read_only=p.read_only))


def _commit(api: Api, who: Principal, p: params.Finish) -> Any:
    return api.transactions.commit(who, one_tx(p.tx, p.tx_id)).then(answers.finished)


def _rollback(api: Api, who: Principal, p: params.Finish) -> Any:
    return api.transactions.rollback(who, one_tx(p.tx, p.tx_id)).then(answers.finished)


def _create_database(api: Api, who: Principal, p: params.Database) -> Any:
    return answers.done(api.schema.create_database(who, p.db))


def _drop_database(api: Api, who: Principal, p: params.Database) -> Any:
    return answers.done(api.schema.drop_database(who, p.db))


def _list_databases(api: Api, who: Principal, p: params.Nothing) -> Any:
    return {"databases": api.schema.list_databases(who)}


def _list_tables(api: Api, who: Principal, p: params.MaybeDatabase) -> Any:
    return {"tables": api.schema.list_tables(who, p.db)}


def _describe_table(api: Api, who: Principal, p: params.TableName) -> Any:
    return answers.described(real_name(p.db), api.schema.describe_table(who, p.db, p.table))


def _create_table(api: Api, who: Principal, p: params.CreateTable) -> Any:
    pending = api.schema.create_table(who, p.db, table_of(p), if_not_exists=p.if_not_exists)
    return pending.then(answers.done)


def _drop_table(api: Api, who: Principal, p: params.DropTable) -> Any:
    return api.schema.drop_table(who, p.db, p.table, if_exists=p.if_exists).then(answers.done)


# --- the tables ------------------------------------------------------------------------------------------

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("system.ping", params.Nothing, _ping, READ, "Is the server there?"),
        Method("system.version", params.Nothing, _version, READ, "Name and version."),
        Method("system.capabilities", params.Nothing, _capabilities, READ, "What this build serves."),
        Method("stats.snapshot", params.MaybeDatabase, _stats, READ, "Numbers of log and capture.", True),
        Method("data.get", params.Get, _get, READ, "One row by its primary key, with its ETag.", True),
        Method("data.insert", params.Insert, _insert, WRITE, "Insert rows, all or none."),
        Method("data.update", params.Update, _update, WRITE, "Set columns of the rows that match."),
        Method("data.delete", params.Delete, _delete, WRITE, "Delete the rows that match."),
        Method("sql.exec", params.SqlExec, _sql, WRITE, "Run one SQL statement.", True),
        Method("tx.begin", params.Begin, _begin, READ, "Open a transaction on one database.", True),
        Method("tx.commit", params.Finish, _commit, READ, "Make a transaction durable."),
        Method("tx.rollback", params.Finish, _rollback, READ, "Forget a transaction."),
        Method("schema.create_database", params.Database, _create_database, OWN, "Create a database.", True),
        Method("schema.drop_database", params.Database, _drop_database, OWN, "Delete a database.", True),
        Method("schema.list_databases", params.Nothing, _list_databases, READ, "Names of databases.", True),
        Method("schema.list_tables", params.MaybeDatabase, _list_tables, READ, "Names of tables.", True),
        Method("schema.describe_table", params.TableName, _describe_table, READ, "A table's shape.", True),
        Method("schema.create_table", params.CreateTable, _create_table, OWN, "Create a table.", True),
        Method("schema.drop_table", params.DropTable, _drop_table, OWN, "Drop a table."),
    )
}

LATER = frozenset(
    {f"query.{name}" for name in ("select", "prepare", "execute_prepared", "explain", "patch", "subscribe")}
    | {f"cdc.{name}" for name in ("subscribe_table", "subscribe_query", "poll", "ack", "pause", "resume")}
    | {f"cdc.{name}" for name in ("close", "list", "seek", "backtest")}
    | {"security.ticket.create"}
)
LATER_GROUPS = ("merge.", "vector.", "view.", "security.token.")


def refusal(name: str) -> HeadwaterError:
    """Why `name`, which is not in METHODS, is not served."""
    if name in LATER or name.startswith(LATER_GROUPS):
        return NotSupported(f"Method '{name}' is not supported in this build", hint="It comes later.")
    if name.startswith("cluster."):
        return NotSupported(f"Method '{name}' is not supported", hint="A server stands alone for now.")
    hint = "system.capabilities lists the methods of this build."
    return NotSupported(f"Method '{name[:80]}' is not supported in this build", hint=hint)
