"""The parameters of each RPC method. Unknown fields, and known ones that are not supported, are rejected."""

from __future__ import annotations

import functools
import re
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import inspect

from headwater.errors import InvalidRequest, NotSupported
from headwater.feeds.subscriptions.subscribe_query import SubscribeQuery
from headwater.feeds.subscriptions.subscribe_table import SubscribeTable

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_AT = re.compile(r"(.*) - at `(?:key in )?\$(.*)`\Z", re.DOTALL)


class Params(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The base of all parameters; `unserved` names fields that are accepted only if empty or false."""

    unserved: ClassVar[tuple[str, ...]] = ()


class Nothing(Params):
    """No parameters."""


class TableName(Params):
    """A table by name; `db` is `main` unless given."""

    table: str
    db: str | None = None


class TokenCreate(Params):
    """Parameters of security.token.create; `label` and `ttl_ms` are SkeinDB's names of `name` and of the lifetime."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] | None = None
    label: Annotated[str, msgspec.Meta(max_length=200)] | None = None
    role: str | None = None
    scopes: list[str] | None = None
    expires_in_seconds: Annotated[int, msgspec.Meta(ge=1, le=10 * 366 * 86_400)] | None = None
    ttl_ms: Annotated[int, msgspec.Meta(ge=0, le=10 * 366 * 86_400_000)] | None = None


class TokenRevoke(Params):
    """Parameters of security.token.revoke; `token_id` is SkeinDB's name of `id`."""

    id: str | None = None
    token_id: str | None = None


class Get(Params):
    """Parameters of data.get: the row's table and primary key."""

    table: TableName
    pk: list[Any]
    format: str | None = None
    tx: str | None = None


class Insert(Params):
    """Parameters of data.insert: the table, the rows, and the columns to return."""

    unserved = ("hints",)
    into: TableName
    rows: list[dict[str, Any]]
    returning: list[str] | None = None
    hints: Any = None
    tx: str | None = None


class Delete(Params):
    """Parameters of data.delete: the table, the condition, and the ETag that the row must have."""

    table: TableName
    where: Any
    limit: Count | None = None
    if_match: str | None = None
    expected_etag: str | None = None
    args: list[Any] = []
    tx: str | None = None


class Update(Delete, kw_only=True):
    """Parameters of data.update: those of data.delete, and the columns to set."""

    set: dict[str, Any]


class SqlExec(Params):
    """Parameters of sql.exec; `default_db` is another name of `db`."""

    unserved = ("explain", "as_of_ms")
    sql: str
    args: list[Any] | dict[str, Any] = []
    db: str | None = None
    default_db: str | None = None
    result_format: str | None = None
    tx: str | None = None
    explain: Any = None
    as_of_ms: Any = None


class Begin(Params):
    """Parameters of tx.begin."""

    db: str | None = None
    read_only: bool = False


class Finish(Params):
    """Parameters of tx.commit and tx.rollback: the transaction, by either name."""

    tx: str | None = None
    tx_id: str | None = None


class Database(Params):
    """A database by name."""

    db: str


class MaybeDatabase(Params):
    """A database by name, `main` unless given."""

    db: str | None = None


class TypeDesc(Params):
    """The type of a column."""

    kind: str
    max: Count | None = None
    precision: Count | None = None
    scale: Count | None = None
    charset: str | None = None
    collation: str | None = None
    unsigned: bool = False


class ColumnDesc(Params):
    """A column of a table to create."""

    name: str
    type: TypeDesc
    nullable: bool | None = None
    auto_increment: bool = False


class CreateTable(TableName, kw_only=True):
    """Parameters of schema.create_table: the table, its columns and primary key."""

    unserved = ("compat_mysql",)
    columns: list[ColumnDesc]
    primary_key: list[str] = []
    if_not_exists: bool = False
    compat_mysql: Any = None


class DropTable(TableName):
    """Parameters of schema.drop_table."""

    if_exists: bool = False


class Subscribe(SubscribeTable, Params, kw_only=True, forbid_unknown_fields=True):
    """Parameters of cdc.subscribe_table and cdc.backtest."""


class SubscribeToQuery(SubscribeQuery, Params, kw_only=True, forbid_unknown_fields=True):
    """Parameters of cdc.subscribe_query."""


class Subscription(Params):
    """A subscription by its id."""

    sub_id: str


class Poll(Params):
    """Parameters of cdc.poll: the subscription, and the page to return."""

    sub_id: str
    from_offset: Count | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 200
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=60_000)] = 0
    cursor: str | None = None


class Ack(Params):
    """Parameters of cdc.ack: the offset, or the cursor of a snapshot, up to which the caller has read."""

    sub_id: str
    offset: Count | None = None
    cursor: str | None = None


class Seek(Params):
    """Parameters of cdc.seek: the offset or the time to continue after."""

    sub_id: str
    offset: Count | None = None
    ts: str | Count | None = None


class ListSubscriptions(Params):
    """Parameters of cdc.list: one subscription, or a page of those of a database or of all."""

    db: str | None = None
    sub_id: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000
    after: str | None = None


Positive = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class PullDescribe(TableName):
    """Parameters of pull.describe; with `after` and `wait_ms`, the call waits for a newer offset."""

    after: Count | None = None
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=60_000)] = 0
    shape: Count | None = None
    step_rows: Annotated[int, msgspec.Meta(ge=1, le=2**53)] | None = None
    step_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**53)] = 256 << 20


class PullChangedTables(MaybeDatabase, kw_only=True):
    """Parameters of pull.changed_tables: an offset for each table; with `wait_ms`, wait for a change after one."""

    after: Annotated[dict[str, Count], msgspec.Meta(min_length=1, max_length=4096)]
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=60_000)] = 0


class PullRanges(TableName):
    """Parameters of pull.ranges: the table, and the target size of its ranges."""

    target_bytes: Positive | None = None


class PullRegister(TableName, kw_only=True):
    """Parameters of pull.register: the table or a range of it, and the subscriber."""

    subscriber: str
    range: Count | None = None
    epoch: Count | None = None
    keep: Count | None = None


class PullRelease(TableName, kw_only=True):
    """Parameters of pull.release: the table, and the subscriber whose lease ends."""

    subscriber: str


class PullSplit(TableName, kw_only=True):
    """Parameters of pull.split: the range, and the key `at` which to split it."""

    range: Count
    epoch: Count
    at: str | None = None


class RangeName(Params):
    """A range by its id and epoch."""

    id: Count
    epoch: Count


class PullMerge(TableName, kw_only=True):
    """Parameters of pull.merge: the two adjacent ranges."""

    ranges: Annotated[list[RangeName], msgspec.Meta(min_length=2, max_length=2)]


def decode(decoder: msgspec.json.Decoder[Any], raw: msgspec.Raw | bytes) -> Any:
    """Return the parameters in `raw`; InvalidRequest names a wrong field, NotSupported a field that is not served."""
    try:
        found = decoder.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise explain(error, "params", decoder.type) from None
    for name in type(found).unserved:
        value = getattr(found, name)
        if value is not None and value is not False and value != [] and value != {}:
            raise NotSupported(f"`{name}` is not supported", hint="Omit the field.")
    return found


def explain(error: Exception, root: str, expected: type[msgspec.Struct]) -> InvalidRequest:
    """Return msgspec's error as InvalidRequest, with the path of the field and the expected fields."""
    hint = f"Expected {shape(expected)}."
    if isinstance(error, RecursionError):
        return InvalidRequest(f"{root}: nested too deeply", hint=hint)
    match = _AT.match(str(error))
    if match:
        return InvalidRequest(f"{root}{match[2]}: {match[1]}", hint=hint)
    return InvalidRequest(f"{root}: {error}", hint=hint)


@functools.cache
def shape(expected: type[msgspec.Struct]) -> str:
    """Return the fields of a struct as readable text; a `?` marks optional fields."""
    return _shape(inspect.type_info(expected))


def _shape(found: inspect.Type) -> str:
    match found:
        case inspect.StructType():
            served = [field for field in found.fields if field.name not in getattr(found.cls, "unserved", ())]
            fields = [f"{f.encode_name}{'' if f.required else '?'}: {_shape(f.type)}" for f in served]
            return f"{{{', '.join(fields)}}}" if fields else "no fields"
        case inspect.ListType():
            return f"[{_shape(found.item_type)}, …]"
        case inspect.DictType():
            return f"{{name: {_shape(found.value_type)}}}"
        case inspect.UnionType():
            return " or ".join(_shape(one) for one in found.types if not isinstance(one, inspect.NoneType))
        case inspect.StrType():
            return "text"
        case inspect.IntType():
            return "integer"
        case inspect.BoolType():
            return "true or false"
    return "value"
