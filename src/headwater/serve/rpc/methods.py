"""The table of RPC methods: parameters, role, summary and implementation of each."""

from __future__ import annotations

import contextlib
import difflib
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec

from headwater import __version__
from headwater.errors import HeadwaterError, InvalidRequest, NotSupported
from headwater.feeds.deliver.backpressure import LagLimits, counters
from headwater.feeds.deliver.poll import PollRequest
from headwater.model.database_name import real_name
from headwater.model.literal import Value
from headwater.model.predicate import Expr, parse_expr
from headwater.model.principal import EDITOR, OWNER, VIEWER, Principal
from headwater.queries.dependencies.subscribed_instances import SubscribedInstances
from headwater.queries.etag.row_etag import one_tag
from headwater.queries.rows.rows import TableAddress
from headwater.queries.statements.pending_answer import PendingAnswer
from headwater.queries.statements.sql import check_format
from headwater.queries.statements.transactions import one_tx
from headwater.ranges.pull.table_status import Step
from headwater.serve.api import Api
from headwater.serve.rpc import params, query_methods, query_params, query_patch, results, security_methods
from headwater.serve.rpc.body_pieces import Pieces, encode_with
from headwater.serve.rpc.query_params import lits_of, value_at, values_of
from headwater.serve.rpc.table_types import table_of

READ, WRITE, OWN = VIEWER, EDITOR, OWNER
VIEWERS_READ = "Viewers can read with query.select, query.prepare and data.get."


@dataclass(frozen=True)
class Method:
    """An RPC method. `call` runs in a thread if `blocking`; else it returns at once, maybe with an awaitable result."""

    name: str
    call: Callable[[Api, Principal, Any], Any]
    role: str
    summary: str
    blocking: bool = False
    instead: str = ""  # alternatives for a caller without the role

    @functools.cached_property
    def params(self) -> type[params.Params]:
        """Return the class of the parameters, from the annotation of `call`."""
        found: type[params.Params] = get_type_hints(self.call)["p"]
        return found


def _then(result: Any, step: Callable[[Any], Any]) -> Any:
    return result.then(step) if isinstance(result, PendingAnswer) else step(result)


def _address(name: params.TableName) -> TableAddress:
    return TableAddress(name.table, name.db)


def _values(bodies: list[Any], path: str) -> list[Value]:
    return [value_at(body, f"{path}[{place}]") for place, body in enumerate(bodies)]


def _columns(bodies: dict[str, Any], path: str) -> dict[str, Value]:
    return {name: value_at(body, f"{path}.{name}") for name, body in bodies.items()}


def _where(p: params.Update | params.Delete) -> Expr:
    return parse_expr(p.where, args=_values(p.args, "args"))


# --- system ----------------------------------------------------------------------------------------------


def _ping(api: Api, who: Principal, p: params.Nothing) -> Any:
    return {"pong": True, "time_unix_ms": time.time_ns() // 1_000_000}


def _version(api: Api, who: Principal, p: params.Nothing) -> Any:
    return {"name": "headwater", "version": __version__, "skeinql": "1.0"}


def _capabilities(api: Api, who: Principal, p: params.Nothing) -> Any:
    absent = ("mysql_compat", "wasm_udf", "wasm_operators")
    return {
        "name": "headwater",
        "skeinql": True,
        **dict.fromkeys(("etag_queries", "causal_etags"), True),
        **dict.fromkeys((*absent, "column_snapshots", "audit_wal", "cluster"), False),
        "methods": sorted(METHODS),
        "hash": {"canonicalization": "RFC8785", "algorithm": "SHA-256", "encoding": "base32"},
        "wire": {"skeinpack_v1": False},
    }


def _stats(api: Api, who: Principal, p: params.MaybeDatabase) -> Any:
    found = api.stats.snapshot(who, p.db)
    status = found[real_name(p.db)]
    if api.feeds is not None:
        cdc = api.feeds.subscriptions.counters(real_name(p.db))
    else:
        limits = LagLimits.of(status.retention_changes)
        cdc = counters([], horizon=status.horizon, latest=status.latest, limits=limits)
    return {"cdc": cdc, "databases": found}


# --- data ------------------------------------------------------------------------------------------------


def _get(api: Api, who: Principal, p: params.Get) -> Any:
    results.check_row_format(p.format)
    found = api.rows.get(who, _address(p.table), _values(p.pk, "pk"), tx=p.tx)
    return _then(found, lambda result: results.found(result, p.format))


def _insert(api: Api, who: Principal, p: params.Insert) -> Any:
    rows = [_columns(row, f"rows[{place}]") for place, row in enumerate(p.rows)]
    return api.rows.insert(who, _address(p.into), rows, returning=p.returning, tx=p.tx).then(results.stored)


def _update(api: Api, who: Principal, p: params.Update) -> Any:
    tag = one_tag(p.if_match, p.expected_etag)
    values = _columns(p.set, "set")
    pending = api.rows.update(who, _address(p.table), _where(p), values, limit=p.limit, if_match=tag, tx=p.tx)
    return pending.then(results.stored)


def _delete(api: Api, who: Principal, p: params.Delete) -> Any:
    tag = one_tag(p.if_match, p.expected_etag)
    pending = api.rows.delete(who, _address(p.table), _where(p), limit=p.limit, if_match=tag, tx=p.tx)
    return pending.then(results.stored)


def _sql(api: Api, who: Principal, p: params.SqlExec) -> Any:
    as_objects = check_format(p.result_format)
    if p.db is not None and p.default_db is not None and real_name(p.db) != real_name(p.default_db):
        raise InvalidRequest("`db` and `default_db` name different databases", hint="Send one of them.")
    args = _columns(p.args, "args") if isinstance(p.args, dict) else _values(p.args, "args")
    db = p.db if p.db is not None else p.default_db
    result = api.statement.execute(who, p.sql, args, db=db, tx=p.tx, named=as_objects)
    return _then(result, lambda outcome: results.outcome(outcome, as_objects))


# --- transactions and schema -----------------------------------------------------------------------------


def _begin(api: Api, who: Principal, p: params.Begin) -> Any:
    return results.begun(api.transactions.begin(who, db=p.db, read_only=p.read_only))


def _commit(api: Api, who: Principal, p: params.Finish) -> Any:
    return api.transactions.commit(who, one_tx(p.tx, p.tx_id)).then(results.finished)


def _rollback(api: Api, who: Principal, p: params.Finish) -> Any:
    return api.transactions.rollback(who, one_tx(p.tx, p.tx_id)).then(results.finished)


def _create_database(api: Api, who: Principal, p: params.Database) -> Any:
    return results.done(api.schema.create_database(who, p.db))


def _drop_database(api: Api, who: Principal, p: params.Database) -> Any:
    done = api.schema.drop_database(who, p.db)
    if api.feeds is not None:
        api.feeds.forget_database(real_name(p.db))
    if api.queries is not None:
        api.queries.dropped(real_name(p.db))
    return results.done(done)


def _list_databases(api: Api, who: Principal, p: params.Nothing) -> Any:
    return {"databases": api.schema.list_databases(who)}


def _list_tables(api: Api, who: Principal, p: params.MaybeDatabase) -> Any:
    return {"tables": api.schema.list_tables(who, p.db)}


def _describe_table(api: Api, who: Principal, p: params.TableName) -> Any:
    return results.described(real_name(p.db), api.schema.describe_table(who, p.db, p.table))


def _create_table(api: Api, who: Principal, p: params.CreateTable) -> Any:
    pending = api.schema.create_table(who, p.db, table_of(p), if_not_exists=p.if_not_exists)
    return pending.then(results.done)


def _drop_table(api: Api, who: Principal, p: params.DropTable) -> Any:
    return api.schema.drop_table(who, p.db, p.table, if_exists=p.if_exists).then(results.done)


# --- feeds -----------------------------------------------------------------------------------------------


def _subscribe_table(api: Api, who: Principal, p: params.Subscribe) -> Any:
    return api.feeding().subscriptions.subscribe(who, p)


def _subscribe_query(api: Api, who: Principal, p: params.SubscribeToQuery) -> Any:
    return api.feeding().subscribe_query(who, p, lits_of(values_of(p.args or [])))


def _query_subscribe(api: Api, who: Principal, p: query_params.QuerySubscribe) -> Any:
    return _stream_urls(api, who, p, lits_of(values_of(p.args)))


async def _stream_urls(
    api: Api, who: Principal, p: query_params.QuerySubscribe, args: list[Any] | dict[str, Any]
) -> Any:
    instance = await SubscribedInstances(api.asking()).find(None, p.query_id, args, who=who)
    path, mark, query = instance.url.partition("?")
    url = f"{path}/events{mark}{query}"
    keys = [f"{instance.db}.{name}" for name in instance.tables]
    return {"query_id": p.query_id, "sse_url": url, "ws_url": url, "table_keys": keys}


def _backtest(api: Api, who: Principal, p: params.Subscribe) -> Any:
    return api.feeding().subscriptions.backtest(who, p)


async def _poll(api: Api, who: Principal, p: params.Poll) -> Any:
    with contextlib.nullcontext() if api.gate is None else api.gate.sessions.cancelling(who):
        return await api.feeding().poll(who, p.sub_id, PollRequest(p.from_offset, p.limit, p.wait_ms, p.cursor))


def _ack(api: Api, who: Principal, p: params.Ack) -> Any:
    return api.feeding().subscriptions.ack(who, p.sub_id, p.offset, p.cursor)


def _pause(api: Api, who: Principal, p: params.Subscription) -> Any:
    return api.feeding().subscriptions.pause(who, p.sub_id, True)


def _resume(api: Api, who: Principal, p: params.Subscription) -> Any:
    return api.feeding().subscriptions.pause(who, p.sub_id, False)


def _close(api: Api, who: Principal, p: params.Subscription) -> Any:
    return api.feeding().subscriptions.close(who, p.sub_id)


async def _list(api: Api, who: Principal, p: params.ListSubscriptions) -> Any:
    feeds = api.feeding()
    if p.sub_id is not None:
        await feeds.check_subscription(who, p.sub_id)
    hidden = await feeds.hidden_queries(who) if p.sub_id is None and who.scopes is not None else set()

    def encoded_page() -> Any:
        page = encode_with(feeds.subscriptions.list(who, p.db, p.sub_id, p.limit, p.after, hidden))
        return page if isinstance(page, Pieces) else msgspec.Raw(page)

    return await feeds.run(encoded_page)  # in a thread: encoding a large page would block the event loop


def _seek(api: Api, who: Principal, p: params.Seek) -> Any:
    return api.feeding().subscriptions.seek(who, p.sub_id, p.offset, p.ts)


# --- pulls -----------------------------------------------------------------------------------------------


async def _pull_describe(api: Api, who: Principal, p: params.PullDescribe) -> Any:
    step = None if p.step_rows is None else Step(p.step_rows, p.step_bytes)
    pulling = api.pulling()
    seen = await pulling.describe(
        who, p.db, p.table, after=p.after, wait_ms=p.wait_ms, shape=p.shape, step=step, run=api.run
    )
    return results.pulled(seen)


async def _pull_changed_tables(api: Api, who: Principal, p: params.PullChangedTables) -> Any:
    found = await api.pulling().changed_tables(who, p.db, p.after, wait_ms=p.wait_ms, run=api.run)
    return msgspec.to_builtins(found)


def _pull_ranges(api: Api, who: Principal, p: params.PullRanges) -> Any:
    return results.listed(api.pulling().listed(who, p.db, p.table, p.target_bytes))


def _pull_register(api: Api, who: Principal, p: params.PullRegister) -> Any:
    found = api.pulling().register(who, p.db, p.table, p.subscriber, range=p.range, epoch=p.epoch, keep=p.keep)
    return results.registered(found)


def _pull_release(api: Api, who: Principal, p: params.PullRelease) -> Any:
    return {"ok": True, "changed": api.pulling().release(who, p.db, p.table, p.subscriber)}


def _pull_split(api: Api, who: Principal, p: params.PullSplit) -> Any:
    at = None if p.at is None else _key(p.at)
    return results.listed(api.pulling().split(who, p.db, p.table, p.range, p.epoch, at))


def _pull_merge(api: Api, who: Principal, p: params.PullMerge) -> Any:
    pair = [(one.id, one.epoch) for one in p.ranges]
    return results.listed(api.pulling().merge(who, p.db, p.table, pair))


def _key(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidRequest(
            "`at` is not a key in hexadecimal digits", hint="Send a key as pull.ranges writes `start` and `end`."
        ) from None


# --- the tables ------------------------------------------------------------------------------------------

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("system.ping", _ping, READ, "Check that the server answers."),
        Method("system.version", _version, READ, "Name and version."),
        Method("system.capabilities", _capabilities, READ, "Methods and features of this build."),
        Method("stats.snapshot", _stats, READ, "Statistics of log and capture.", True),
        Method("data.get", _get, READ, "One row by its primary key, with its ETag.", True),
        Method("data.insert", _insert, WRITE, "Insert rows, all or none."),
        Method("data.update", _update, WRITE, "Set columns of the rows that match."),
        Method("data.delete", _delete, WRITE, "Delete the rows that match."),
        Method("sql.exec", _sql, WRITE, "Run one SQL statement.", True, VIEWERS_READ),
        Method("tx.begin", _begin, READ, "Open a transaction on one database.", True),
        Method("tx.commit", _commit, READ, "Commit a transaction."),
        Method("tx.rollback", _rollback, READ, "Roll back a transaction."),
        Method("schema.create_database", _create_database, OWN, "Create a database.", True),
        Method("schema.drop_database", _drop_database, OWN, "Delete a database.", True),
        Method("schema.list_databases", _list_databases, READ, "Names of databases.", True),
        Method("schema.list_tables", _list_tables, READ, "Names of tables.", True),
        Method("schema.describe_table", _describe_table, READ, "Columns and primary key of a table.", True),
        Method("schema.create_table", _create_table, OWN, "Create a table.", True),
        Method("schema.drop_table", _drop_table, OWN, "Drop a table."),
        Method("cdc.subscribe_table", _subscribe_table, READ, "Create a durable subscription.", True),
        Method("cdc.subscribe_query", _subscribe_query, READ, "Subscribe to invalidations of a query."),
        Method("query.subscribe", _query_subscribe, READ, "URLs of the invalidation stream of a query."),
        Method("cdc.poll", _poll, READ, "The next changes; can wait for some."),
        Method("cdc.ack", _ack, READ, "Acknowledge changes: advance the cursor.", True),
        Method("cdc.pause", _pause, READ, "Pause delivery.", True),
        Method("cdc.resume", _resume, READ, "Resume delivery.", True),
        Method("cdc.close", _close, READ, "Delete a subscription.", True),
        Method("cdc.list", _list, READ, "Subscriptions with their cursor and lag."),
        Method("cdc.seek", _seek, READ, "Move a cursor to an offset or a time.", True),
        Method("cdc.backtest", _backtest, READ, "Changes a subscription would have received.", True),
        Method("query.prepare", query_methods.prepare, READ, "Store a query; its id is a hash of it."),
        Method("query.execute_prepared", query_methods.execute, READ, "Execute a prepared query."),
        Method("query.select", query_methods.select, READ, "Execute a query."),
        Method("query.explain", query_methods.explain, READ, "Dependencies of a query, in words."),
        Method("query.patch", query_patch.patch_method, READ, "Difference of a result since an ETag."),
        Method("pull.describe", _pull_describe, READ, "A table and the offsets of its log."),
        Method("pull.changed_tables", _pull_changed_tables, READ, "Tables that changed after given offsets."),
        Method("pull.ranges", _pull_ranges, READ, "The key ranges of a table.", True),
        Method("pull.register", _pull_register, READ, "Retain the log for a snapshot.", True),
        Method("pull.release", _pull_release, READ, "Stop retaining the log for a subscriber.", True),
        Method("pull.split", _pull_split, OWN, "Split a range in two.", True),
        Method("pull.merge", _pull_merge, OWN, "Merge two adjacent ranges.", True),
        Method("security.ticket.create", security_methods.ticket, READ, "A short-lived ticket for stream URLs."),
        Method("security.token.create", security_methods.create, OWN, "Create an API key; it is shown once.", True),
        Method("security.token.list", security_methods.listed, OWN, "The API keys, without their secrets."),
        Method("security.token.revoke", security_methods.revoke, OWN, "Revoke an API key and end its streams."),
    )
}

LATER_GROUPS = ("merge.", "vector.", "view.")


def refusal(name: str) -> HeadwaterError:
    """Return the error for `name`, which is not in METHODS."""
    if name.startswith(LATER_GROUPS):
        return NotSupported(
            f"Method '{name}' is not supported in this build",
            hint="It is planned for a later build; system.capabilities lists the methods of this one.",
        )
    if name.startswith("cluster."):
        return NotSupported(
            f"Method '{name}' is not supported", hint="Clusters are not supported: use the methods of one server."
        )
    near = difflib.get_close_matches(name[:80], METHODS, n=1, cutoff=0.7)
    hint = f"Did you mean {near[0]}?" if near else "system.capabilities lists the methods of this build."
    return NotSupported(f"Method '{name[:80]}' is not supported in this build", hint=hint)
