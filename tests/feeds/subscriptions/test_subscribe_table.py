"""Validation of cdc.subscribe_table: errors name their field, missing fields have defaults, other exceptions never
escape."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.feeds.filter_source import TABLES, FilterSource
from tests.sources.sqlite_source import Rig

from headwater.errors import HeadwaterError, InvalidRequest, NotFound, NotSupported
from headwater.feeds.options import Options, Shard
from headwater.feeds.subscriptions.subscribe_table import Request, Start, SubscribeTable, check
from headwater.model.table import Column, Table

ODD = Table("odd", (Column("id", collation="KLINGON"), Column("note")), ("id",))


class Source(FilterSource):
    """Some tables with a feed and one without."""

    def describe(self) -> dict[str, Table]:
        return super().describe() | {"huge": Table("huge", (Column("id"),), ("id",))}

    def status(self) -> dict[str, Any]:
        return super().status() | {"uncaptured": {"huge": "it has 3000 columns"}}


SOURCE = Source("main", *TABLES, ODD)


def i(value: int) -> dict[str, Any]:
    return {"t": "i64", "v": value}


def s(value: str) -> dict[str, Any]:
    return {"t": "str", "v": value}


def ask(source: FilterSource = SOURCE, **params: Any) -> Request:
    return check(msgspec.json.decode(json.dumps(params), type=SubscribeTable), source)


def refused(kind: type[HeadwaterError] = InvalidRequest, **params: Any) -> str:
    with pytest.raises(kind) as found:
        ask(**params)
    assert type(found.value) is kind
    return found.value.message


def of(**params: Any) -> Options:
    return ask(table="numbered", **params).options


# --- valid requests --------------------------------------------------------------------------------------


def test_request_with_only_a_table_delivers_all_its_changes_from_the_head() -> None:
    assert ask(table="numbered") == Request(Options(db="main", tables=("numbered",)), Start("latest"), None)


def test_database_without_tables_is_every_table() -> None:
    assert ask(db="main") == ask(tables=[]) == ask() == Request(Options(db="main"), Start(), None)


def test_subscription_to_database_default_uses_main() -> None:
    assert ask(db="default").options.db == "main"


def test_names_in_list_options_are_sorted_and_unique() -> None:
    assert ask(tables=["paired", "named", "paired"]).options.tables == ("named", "paired")
    assert of(ops=[" Update", "INSERT", "update ", "truncate", "schema_change"]).ops == (
        "insert",
        "schema_change",
        "truncate",
        "update",
    )
    assert of(columns=[" size", "note", "size "]).columns == ("note", "size")


def test_filters_are_kept_unchanged() -> None:
    assert of(pk=[i(1)]).pk == [i(1)]
    assert of(pk_range={"lower_bound": i(1), "upper_bound": None}).pk_range == {"lower_bound": i(1)}
    assert of(pk_range={"lower_bound": i(1), "upper_bound": i(1)}).pk_range is not None
    assert of(shard={"index": 0, "of": 1}).shard == Shard(0, 1)
    assert of(shard={"index": 1023, "of": 1024}).shard == Shard(1023, 1024)
    assert of(where="size > 3").where == "size > 3"
    spans = [{"prefix": [s("a")]}, {"lower_bound": [s("b")], "upper_bound": [s("c"), i(2)]}, {"upper_bound": [s("z")]}]
    assert ask(table="paired", spans=spans).options.spans == spans
    assert ask(tables=["paired"], spans=spans).options.spans == spans


def test_shard_may_cover_many_tables() -> None:
    assert ask(tables=["named", "bare"], shard={"index": 0, "of": 2}).options.shard == Shard(0, 2)


def test_images_are_omitted_by_default_except_for_envelopes_and_snapshots() -> None:
    assert (of().before, of().after) == (False, False)
    assert (of(include={"after": True}).before, of(include={"after": True}).after) == (False, True)
    for form in ("debezium_json", "cloudevents_json", "cockroach_wrapped_json"):
        assert (of(format=form).before, of(format=form).after) == (True, True)
        assert (of(format=form, include={"after": True}).before, of(format=form, include={}).after) == (False, False)
    assert (of(start="snapshot").before, of(start="snapshot").after) == (False, True)
    assert of(start="snapshot", include={"before": True}).after is False


@pytest.mark.parametrize(
    ("given", "start"),
    [
        ("latest", Start("latest")),
        ("earliest", Start("earliest")),
        ("snapshot", Start("snapshot")),
        ({"offset": 0}, Start("offset", 0)),
        ({"offset": 2**63 - 1}, Start("offset", 2**63 - 1)),
        ({"ts": "1763172000000.3"}, Start("ts", 1763172000000 << 16 | 3)),
        ({"ts": 1763172000000}, Start("ts", 1763172000000 << 16)),
    ],
)
def test_start_positions_are_parsed(given: Any, start: Start) -> None:
    assert ask(start=given).start == start


def test_name_and_txn_are_parsed() -> None:
    assert ask(name="café \N{SNOWMAN} 1").name == "café \N{SNOWMAN} 1"
    assert ask(name="x" * 200).name == "x" * 200
    assert of(txn="atomic").txn == "atomic"
    assert of(txn="atomic_strict").txn == "atomic_strict"


def test_options_survive_being_stored() -> None:
    made = of(pk=[{"t": "u64", "v": 2**64 - 1}], where="size > 3", shard={"index": 1, "of": 2}, columns=["note"])
    assert msgspec.json.decode(msgspec.json.encode(made), type=Options) == made


# --- invalid requests ------------------------------------------------------------------------------------


def test_unknown_table_is_not_found_with_the_nearest_name() -> None:
    with pytest.raises(NotFound) as found:
        ask(table="numberd")
    assert "'numberd'" in found.value.message
    assert found.value.hint == "Did you mean 'numbered'?"
    assert "'nowhere'" in refused(NotFound, tables=["named", "nowhere"])


def test_uncaptured_table_is_rejected_with_the_reason() -> None:
    assert "it has 3000 columns" in refused(NotSupported, table="huge")


def test_unknown_option_is_an_error() -> None:
    with pytest.raises(msgspec.ValidationError, match="colour"):
        ask(table="numbered", colour="red")


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("tables", {"table": "named", "tables": ["named"]}),
    ("tables", {"table": "named", "tables": []}),
    ("ops", {"ops": []}),
    ("ops", {"ops": ["insert", "upsert"]}),
    ("ops", {"ops": [""]}),
    ("columns", {"table": "named", "columns": []}),
    ("columns", {"table": "named", "columns": ["note", "  "]}),
    ("columns", {"table": "named", "columns": ["colour"]}),
    ("columns", {"table": "bare", "columns": ["rowid"]}),
    ("columns", {"columns": ["note"]}),
    ("include.during", {"include": {"during": True}}),
    ("include.before", {"include": {"before": 1}}),
    ("include.after", {"include": {"after": None}}),
    ("format", {"format": "xml"}),
    ("format", {"format": ""}),
    ("pk", {"table": "numbered", "pk": []}),
    ("pk", {"table": "numbered", "pk": [i(1), i(2)]}),
    ("pk", {"table": "paired", "pk": [s("a")]}),
    ("pk", {"table": "bare", "pk": [i(1)]}),
    ("pk", {"table": "numbered", "pk": [1]}),
    ("pk", {"table": "numbered", "pk": [{"t": "i64", "v": "one"}]}),
    ("pk", {"table": "numbered", "pk": [{"t": "null"}]}),
    ("pk", {"pk": [i(1)]}),
    ("pk", {"tables": ["named", "numbered"], "pk": [i(1)]}),
    ("pk_range", {"table": "numbered", "pk_range": {}}),
    ("pk_range", {"table": "numbered", "pk_range": {"lower_bound": None}}),
    ("pk_range", {"table": "numbered", "pk_range": {"lower_bound": i(1), "limit": i(2)}}),
    ("pk_range", {"table": "numbered", "pk_range": {"lower_bound": i(2), "upper_bound": i(1)}}),
    ("pk_range", {"table": "numbered", "pk_range": {"lower_bound": [i(2)]}}),
    ("pk_range", {"table": "paired", "pk_range": {"lower_bound": s("a")}}),
    ("pk_range", {"table": "bare", "pk_range": {"lower_bound": i(1)}}),
    ("pk_range", {"pk_range": {"lower_bound": i(1)}}),
    ("spans", {"table": "paired", "spans": []}),
    ("spans[0]", {"table": "paired", "spans": [{}]}),
    ("spans[1]", {"table": "paired", "spans": [{"prefix": [s("a")]}, {"lower": [s("a")]}]}),
    ("spans[0]", {"table": "paired", "spans": [{"prefix": [s("a")], "upper_bound": [s("b")]}]}),
    ("spans[0].prefix", {"table": "paired", "spans": [{"prefix": []}]}),
    ("spans[0].prefix", {"table": "paired", "spans": [{"prefix": s("a")}]}),
    ("spans[0].prefix", {"table": "paired", "spans": [{"prefix": None}]}),
    ("spans[0].lower_bound", {"table": "paired", "spans": [{"lower_bound": s("a")}]}),
    ("spans", {"table": "paired", "spans": [{"prefix": [s("a"), i(1), i(2)]}]}),
    ("spans", {"table": "paired", "spans": [{"lower_bound": [s("b")], "upper_bound": [s("a")]}]}),
    ("spans", {"table": "paired", "spans": [{"prefix": [{"t": "moon"}]}]}),
    ("spans", {"table": "bare", "spans": [{"prefix": [i(1)]}]}),
    ("spans", {"spans": [{"prefix": [i(1)]}]}),
    ("shard", {"shard": {}}),
    ("shard", {"shard": {"index": 0}}),
    ("shard", {"shard": {"index": 1, "of": 1}}),
    ("shard", {"shard": {"index": -1, "of": 2}}),
    ("shard", {"shard": {"index": 0, "of": 1025}}),
    ("shard", {"shard": {"index": False, "of": True}}),
    ("shard", {"shard": {"index": 0.0, "of": 2}}),
    ("shard", {"shard": {"index": 0, "of": 2, "by": "id"}}),
    ("where", {"table": "numbered", "where": ""}),
    ("where", {"table": "numbered", "where": " \n"}),
    ("where", {"table": "numbered", "where": "DROP TABLE numbered"}),
    ("where", {"where": "size > 3"}),
    ("start", {"start": "Latest"}),
    ("start", {"start": {}}),
    ("start", {"start": {"offset": -1}}),
    ("start", {"start": {"offset": 2**63}}),
    ("start", {"start": {"offset": True}}),
    ("start", {"start": {"offset": 1, "ts": 1}}),
    ("start", {"start": {"ts": 1.5}}),
    ("start", {"start": {"etag": "x"}}),
    ("start.ts", {"start": {"ts": "yesterday"}}),
    ("start.ts", {"start": {"ts": -1}}),
    ("name", {"name": ""}),
    ("name", {"name": "x" * 201}),
    ("name", {"name": "two\nlines"}),
    ("txn", {"txn": ""}),
    ("txn", {"txn": "none"}),
]


@pytest.mark.parametrize(("field", "params"), REFUSED, ids=lambda each: each if isinstance(each, str) else "")
def test_error_names_the_field(field: str, params: dict[str, Any]) -> None:
    assert f"`{field}" in refused(**params)


def test_only_table_of_a_database_must_be_named_for_a_row_filter() -> None:
    alone = FilterSource("main", TABLES[0])
    with pytest.raises(InvalidRequest, match="`where` needs exactly one table"):
        ask(alone, where="size > 3")


def test_filters_are_checked_against_a_real_database(rig: Callable[..., Rig]) -> None:
    source = rig("CREATE TABLE t(id INTEGER PRIMARY KEY, name TEXT)", "CREATE TABLE u(a)").source

    def refusal(**params: Any) -> str:
        with pytest.raises(InvalidRequest) as found:
            check(SubscribeTable(**params), source)
        return found.value.message

    made = check(SubscribeTable(table="t", pk=[i(1)], where="name LIKE 'a%' AND id > 0", columns=["name"]), source)
    assert made.options.where == "name LIKE 'a%' AND id > 0"
    assert check(SubscribeTable(), source).options.tables == ()
    assert refusal(table="t", pk=[s("one")]).startswith("`pk`")
    assert refusal(table="t", where="nme = 'x'").startswith("`where`")
    assert refusal(table="t", where="1; DELETE FROM t").startswith("`where`")
    assert refusal(table="t", where="random() > 0").startswith("`where`")
    assert refusal(table="u", pk_range={"lower_bound": i(1)}).startswith("`pk_range`")
    with pytest.raises(NotFound):
        check(SubscribeTable(table="sqlite_schema"), source)


def test_unknown_column_hint_names_the_nearest() -> None:
    with pytest.raises(InvalidRequest) as found:
        of(columns=["sise"])
    assert found.value.hint == "Did you mean 'size'?"


def test_shard_is_refused_for_a_table_whose_key_has_an_unknown_collation() -> None:
    assert "`shard`" in refused(NotSupported, table="odd", shard={"index": 0, "of": 2})


def test_lone_surrogates_are_rejected() -> None:
    with pytest.raises(InvalidRequest, match="`where`"):
        check(SubscribeTable(table="numbered", where="note = '\ud800'"), SOURCE)
    with pytest.raises(InvalidRequest, match="`name`"):
        check(SubscribeTable(table="numbered", name="\ud800"), SOURCE)


# --- random input ----------------------------------------------------------------------------------------

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.sampled_from(["named", "paired", "numbered", "latest", "insert", "size", "plain_json", "atomic", "size > 3"]),
    st.sampled_from(
        [i(1), s("a"), {"t": "bytes", "b64": "AA=="}, {"t": "embedding", "v": [1]}, {"t": "f64", "v": "NaN"}]
    ),
    st.sampled_from([{"t": "dec", "v": "1e19999"}, {"t": "json", "v": {}}, {"t": "unavailable"}, {"t": "null"}]),
)
WORDS = ["prefix", "lower_bound", "upper_bound", "index", "of", "before", "after", "offset", "ts", "t", "v"]
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = [field.name for field in msgspec.structs.fields(SubscribeTable)]


@given(
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4), st.sampled_from([None, "named", "paired", "numbered"])
)
@example({"pk": [{"t": "embedding", "v": [1]}]}, "numbered")
def test_any_input_raises_only_headwater_errors(params: dict[str, Any], table: str | None) -> None:
    body = params | ({"table": table} if table else {})
    try:
        asked = msgspec.convert(body, SubscribeTable)
    except msgspec.ValidationError:
        return
    try:
        made = check(asked, SOURCE)
    except HeadwaterError as error:
        assert error.status < 500 or isinstance(error, NotSupported)
    else:
        assert msgspec.json.decode(msgspec.json.encode(made.options), type=Options) == made.options


# --- limits and hints ------------------------------------------------------------------------------------


def test_more_than_a_thousand_spans_are_rejected() -> None:
    spans = [{"prefix": [i(number)]} for number in range(1001)]
    assert len(of(spans=spans[:1000]).spans or ()) == 1000
    assert "`spans` holds 1001" in refused(table="numbered", spans=spans)


def test_too_large_options_are_rejected() -> None:
    long = [{"prefix": [s("x" * 1000)]} for _ in range(70)]
    assert "65536" in refused(table="named", spans=long)
    assert len(ask(table="named", spans=long[:60]).options.spans or ()) == 60


def test_request_records_whether_images_were_named() -> None:
    assert ask(table="numbered", include={}).names_images
    assert not ask(table="numbered", start="snapshot").names_images


@pytest.mark.parametrize(
    "bad",
    [
        {"name": ""},
        {"name": "a\nb"},
        {"pk": [{"t": "null"}]},
        {"pk_range": {"lower_bound": i(5), "upper_bound": i(4)}},
        {"spans": [{"prefix": [i(1)]}] * 1001},
        {"where": "x" * 70_000},
    ],
)
def test_error_has_a_hint(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as found:
        ask(table="numbered", **bad)
    assert found.value.hint


# --- limits ----------------------------------------------------------------------------------------------


class Counting(Source):
    """Counts how often the status is read."""

    asked = 0

    def status(self) -> dict[str, Any]:
        self.asked += 1
        return super().status()


def test_repeated_table_names_read_the_status_once() -> None:
    source = Counting("main", *TABLES, ODD)
    assert ask(source, tables=["numbered", "named"] * 5_000).options.tables == ("named", "numbered")
    assert source.asked == 1


def test_too_many_table_names_are_rejected_with_the_limit() -> None:
    with pytest.raises(InvalidRequest, match="`tables` holds 1001 names") as found:
        ask(tables=[f"t{n}" for n in range(1_001)])
    assert "at most 1000" in found.value.hint
