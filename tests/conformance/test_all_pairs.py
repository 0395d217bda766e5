"""Every option of cdc.subscribe_table with every other one, over every transport, against our own model.

The model knows the history that was written, and derives from the documentation what a filter passes. F24–F42, F57–F70,
F168.
"""

import random
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any, NamedTuple

import pytest
from tests.conformance.live_server import Live
from tests.conformance.option_pairs import Combination, all_pairs, pairs
from tests.conformance.readers import CHANGES

I64 = "i64"
Row = dict[str, Any]


def lit(value: int) -> dict[str, Any]:
    return {"t": I64, "v": value}


OPTIONS: dict[str, dict[str, Any]] = {
    "scope": {
        "table": {"table": "items"},
        "one of tables": {"tables": ["items"]},
        "two tables": {"tables": ["items", "others"]},
        "database": {},
    },
    "ops": {
        "all": {},
        "moves": {"ops": ["insert", "delete"]},
        "update": {"ops": ["update"]},
        "ddl": {"ops": ["schema_change", "insert"]},
    },
    "key": {
        "any": {},
        "pk": {"pk": [lit(5)]},
        "range": {"pk_range": {"lower_bound": lit(3), "upper_bound": lit(12)}},
        "spans": {"spans": [{"prefix": [lit(2)]}, {"lower_bound": [lit(9)]}]},
    },
    "shard": {"none": {}, "first": {"shard": {"index": 0, "of": 2}}, "second": {"shard": {"index": 1, "of": 2}}},
    "where": {"none": {}, "number": {"where": "n > 50"}, "text": {"where": "grp = 'a' AND note IS NOT NULL"}},
    "columns": {"all": {}, "n": {"columns": ["n"]}, "two": {"columns": ["note", "grp"]}},
    "include": {
        "default": {},
        "before": {"include": {"before": True}},
        "after": {"include": {"after": True}},
        "both": {"include": {"before": True, "after": True}},
    },
    "format": {
        name: {"format": name}
        for name in ("objects_json", "plain_json", "debezium_json", "cloudevents_json", "cockroach_wrapped_json")
    },
    "start": {name: {} for name in ("latest", "earliest", "offset", "ts", "snapshot")},
    "txn": {"none": {}, "atomic": {"txn": "atomic"}},
    "name": {"none": {}, "named": {}},
}
TRANSPORTS = ("poll", "small polls", "sse", "ws", "sse late", "ws late")
FACTORS = {name: tuple(values) for name, values in OPTIONS.items()} | {"transport": TRANSPORTS}
INSIDE: dict[str, Callable[[Row], bool]] = {
    "any": lambda row: True,
    "pk": lambda row: row["id"] == 5,
    "range": lambda row: 3 <= row["id"] <= 12,
    "spans": lambda row: row["id"] == 2 or row["id"] >= 9,
    "none": lambda row: True,
    "number": lambda row: row["n"] is not None and row["n"] > 50,
    "text": lambda row: row["grp"] == "a" and row["note"] is not None,
}


def fits(made: Combination) -> bool:
    """Return whether the options fit together: filters of one table need one table."""
    many = made.get("scope") in ("two tables", "database")
    return not (
        many and any(made.get(name, "none") not in ("any", "none", "all") for name in ("key", "where", "columns"))
    )


COMBINATIONS = all_pairs(FACTORS, fits)


class Told(NamedTuple):
    """One delivered change, independent of its format."""

    offset: int | None
    op: str
    table: str
    key: int | None
    before: Row | None
    after: Row | None


class Entry(NamedTuple):
    """One change as it was written."""

    offset: int
    op: str
    table: str
    before: Row | None = None
    after: Row | None = None


# --- the history -----------------------------------------------------------------------------------------


class History:
    """Writes random statements, each of which changes one row, and records them."""

    def __init__(self, live: Live, seed: int) -> None:
        self._live, self._dice = live, random.Random(seed)
        self.entries: list[Entry] = []
        self.rows: dict[int, Row] = {}
        for number, name in enumerate(("items", "others"), 1):
            live.sql(f"CREATE TABLE {name}(id INTEGER PRIMARY KEY, grp TEXT, n INTEGER, note TEXT)")
            self.entries.append(Entry(number, "schema_change", name))

    @property
    def latest(self) -> int:
        return len(self.entries)

    def write(self, transactions: int) -> None:
        for step in range(transactions):
            statements = [self._statement(step) for _ in range(self._dice.choice((1, 1, 2, 4)))]
            self._live.together(*statements)

    def _statement(self, step: int) -> str:
        dice, id = self._dice, self._dice.randrange(1, 16)
        if step % 7 == 6:
            self._add("insert", "others", None, {"id": self.latest, "grp": None, "n": 1, "note": None})
            return f"INSERT INTO others VALUES({self.latest - 1}, NULL, 1, NULL)"
        if id not in self.rows:
            row = {
                "id": id,
                "grp": dice.choice("ab"),
                "n": dice.choice((None, 10, 60, 90)),
                "note": dice.choice((None, "x")),
            }
            return self._insert(row)
        before = self.rows[id]
        if dice.random() < 0.2:
            del self.rows[id]
            self._add("delete", "items", before, None)
            return f"DELETE FROM items WHERE id = {id}"
        free = [other for other in range(1, 20) if other not in self.rows]
        change = dice.choice(
            [
                {"grp": "a" if before["grp"] == "b" else "b"},
                {"n": dice.choice([value for value in (None, 20, 70) if value != before["n"]])},
                {"note": "y" if before["note"] is None else None},
                {"id": dice.choice(free)},
            ]
        )
        after = {**before, **change}
        del self.rows[id]
        self.rows[after["id"]] = after
        self._add("update", "items", before, after)
        return f"UPDATE items SET {_set(change)} WHERE id = {id}"

    def _insert(self, row: Row) -> str:
        self.rows[row["id"]] = row
        self._add("insert", "items", None, row)
        return f"INSERT INTO items VALUES({', '.join(map(_sql, row.values()))})"

    def _add(self, op: str, table: str, before: Row | None, after: Row | None) -> None:
        self.entries.append(Entry(self.latest + 1, op, table, before, after))


def _sql(value: Any) -> str:
    return "NULL" if value is None else repr(value)


def _set(change: Row) -> str:
    return ", ".join(f"{name} = {_sql(value)}" for name, value in change.items())


# --- the model -------------------------------------------------------------------------------------------


class Model:
    """The deliveries that one combination must make."""

    def __init__(self, made: Combination, shares: list[set[int]]) -> None:
        self._made, self._shares = made, shares
        given = {name: value for part in OPTIONS for name, value in OPTIONS[part][made[part]].items()}
        self._ops, self._columns = given.get("ops"), given.get("columns")
        self._tables = {"table": {"items"}, "one of tables": {"items"}}.get(made["scope"], {"items", "others"})
        envelope = made["format"] not in ("objects_json", "plain_json")
        default = {"before": envelope, "after": envelope or made["start"] == "snapshot"}
        self._include = given.get("include", default)

    def inside(self, row: Row | None) -> bool:
        if row is None:
            return False
        share = {"none": True, "first": row["id"] in self._shares[0], "second": row["id"] in self._shares[1]}
        return INSIDE[self._made["key"]](row) and INSIDE[self._made["where"]](row) and share[self._made["shard"]]

    def changes(self, entries: list[Entry]) -> Iterator[Told]:
        for entry in entries:
            if entry.table not in self._tables:
                continue
            op = self._op(entry)
            if op is None or (self._ops and op not in self._ops):
                continue
            row = entry.before if op == "delete" else entry.after
            yield Told(
                entry.offset,
                op,
                entry.table,
                row and row["id"],
                self._image("before", entry.before) if op in ("update", "delete") else None,
                self._image("after", entry.after) if op in ("insert", "update") else None,
            )

    def _op(self, entry: Entry) -> str | None:
        if entry.op == "schema_change":
            return entry.op
        case = self.inside(entry.before), self.inside(entry.after)
        op = {(True, True): "update", (False, True): "insert", (True, False): "delete"}.get(case)
        if op == "update" and self._columns:
            watched = (*self._columns, "id")
            if all(entry.before[name] == entry.after[name] for name in watched):  # type: ignore[index]
                return None
        return op

    def rows(self, tables: dict[str, dict[int, Row]]) -> Iterator[Told]:
        """Yield the rows of a snapshot."""
        if self._ops and "insert" not in self._ops:
            return
        for table in sorted(self._tables):
            for _, row in sorted(tables[table].items()):
                if self.inside(row):
                    yield Told(None, "insert", table, row["id"], None, self._image("after", row))

    def _image(self, which: str, row: Row | None) -> Row | None:
        if not self._include.get(which) or row is None:
            return None
        return {name: value for name, value in row.items() if not self._columns or name in self._columns}


# --- reading the formats ---------------------------------------------------------------------------------


def _plain(row: Row | None) -> Row | None:
    return None if row is None else {name: value.get("v") for name, value in row.items()}


def understood(format: str, data: dict[str, Any]) -> Told:
    """Return the change in `data`; cockroach_wrapped_json has neither offset nor op."""
    match format:
        case "objects_json":
            key = data["pk"][0]["v"] if "pk" in data else None
            return Told(
                data["offset"], data["op"], data["table"], key, _plain(data.get("before")), _plain(data.get("after"))
            )
        case "cloudevents_json" | "plain_json":
            data = data.get("data", data)
            key = data["pk"][0] if "pk" in data else None
            return Told(data["offset"], data["op"], data["table"], key, data.get("before"), data.get("after"))
        case "debezium_json":
            source = data["source"]
            if "ddl" in data:
                return Told(source["lsn"], "schema_change", source["table"], None, None, None)
            op = {"c": "insert", "r": "insert", "u": "update", "d": "delete"}[data["op"]]
            return Told(source["lsn"], op, source["table"], data["key"]["id"], data["before"], data["after"])
    key = data["key"][0] if "key" in data else None
    return Told(None, "", data["topic"], key, data.get("before"), data.get("after"))


def comparable(format: str, told: Told, *, snapshot: bool = False) -> Told:
    if format == "cockroach_wrapped_json":
        told = told._replace(offset=None, op="")
    return told._replace(offset=None) if snapshot else told


# --- the test --------------------------------------------------------------------------------------------


class Delivered(NamedTuple):
    rows: list[dict[str, Any]]
    changes: list[dict[str, Any]]


def by_poll(live: Live, sub: dict[str, Any], limit: int) -> Delivered:
    rows: list[dict[str, Any]] = []
    changes: list[dict[str, Any]] = []
    page = live.poll(sub, limit=limit)
    while "snapshot" in page:
        rows += page["events"]
        after = (
            {"from_offset": page["next_offset"]} if page["snapshot"]["done"] else {"cursor": page["snapshot"]["cursor"]}
        )
        page = live.poll(sub, limit=limit, **after)
    changes += page["events"]
    while not page["caught_up"]:
        page = live.poll(sub, limit=limit, from_offset=page["next_offset"])
        changes += page["events"]
    return Delivered(rows, changes)


def by_stream(stream: Any, upto: int) -> Delivered:
    """Return rows and changes before the checkpoint at `upto`; check that frames agree with their content."""
    rows, changes = [], []
    while (frame := stream.next()).word != "checkpoint" or frame.data["offset"] < upto:
        if str(frame.id).startswith("s:"):
            rows.append(frame.data)
        elif frame.word in CHANGES:
            changes.append(frame.data)
    return Delivered(rows, changes)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], tuple[Any, Any]]]:
    """Return a function from a combination's number to its deliveries and the expected ones, all over one history."""
    live = Live(tmp_path_factory.mktemp("pairs"), feeds={"checkpoint_seconds": 0.2})
    history = History(live, seed=11)
    history.write(25)
    middle = history.latest
    reference = live.poll(live.subscribe(start="earliest"), limit=10_000)["events"]
    shares = [
        {change["pk"][0] for change in live.changes(_share(live, index), limit=10_000) if "pk" in change}
        for index in (0, 1)
    ]
    time_of = {change["offset"]: change["ts"] for change in reference}
    before = {"items": dict(history.rows), "others": _others(history)}
    subs, streams = [], {}
    for number, made in enumerate(COMBINATIONS):
        given = {name: value for part in OPTIONS for name, value in OPTIONS[part][made[part]].items()}
        start: Any = {"offset": {"offset": 9}, "ts": {"ts": time_of[9]}}.get(made["start"], made["start"])
        if made["name"] == "named":
            given["name"] = f"combination {number}"
        subs.append(live.ok("cdc.subscribe_table", start=start, **given))
        if made["transport"] in ("sse", "ws"):
            streams[number] = live.stream(made["transport"], subs[-1])
    openings: dict[int, list[Any]] = {}
    for number, stream in streams.items():  # their rows are of now, before more is written
        if COMBINATIONS[number]["start"] == "snapshot":
            openings[number] = [frame for frame in stream.upto("snapshot_end") if str(frame.id).startswith("s:")]
    history.write(25)
    for index, share in enumerate(shares):
        share |= {change["pk"][0] for change in live.changes(_share(live, index), limit=10_000) if "pk" in change}
    assert not shares[0] & shares[1]
    after = {"items": dict(history.rows), "others": _others(history)}
    assert [row[0] for row in live.sql("SELECT id FROM items ORDER BY id")] == sorted(history.rows), (
        "the model is right"
    )
    for number, made in enumerate(COMBINATIONS):
        if made["transport"].endswith("late"):
            streams[number] = live.stream(made["transport"].split()[0], subs[number])
    same_ts = max(offset for offset, ts in time_of.items() if ts == time_of[9])
    begins = {"latest": middle, "earliest": 0, "offset": 9, "ts": same_ts}

    def run(number: int) -> tuple[Any, Any]:
        made = COMBINATIONS[number]
        model, transport = Model(made, shares), made["transport"]
        if number in streams:
            found = by_stream(streams[number], history.latest)
        else:
            found = by_poll(live, subs[number], 3 if transport == "small polls" else 10_000)
        rows = [frame.data for frame in openings.get(number, ())] + found.rows
        expected_rows: list[Told] = []
        begin = begins.get(made["start"], middle if number in openings else history.latest)
        if made["start"] == "snapshot":
            expected_rows = list(model.rows(before if number in openings else after))
        expected = list(model.changes(history.entries[begin:]))
        form = made["format"]
        return (
            [comparable(form, understood(form, data), snapshot=True) for data in rows]
            + [understood(form, data) for data in found.changes],
            [comparable(form, told, snapshot=True) for told in expected_rows]
            + [comparable(form, told) for told in expected],
        )

    yield run
    live.stop()


def _share(live: Live, index: int) -> dict[str, Any]:
    return live.subscribe(shard={"index": index, "of": 2}, start="earliest")


def _others(history: History) -> dict[int, Row]:
    return {entry.after["id"]: entry.after for entry in history.entries if entry.table == "others" and entry.after}


@pytest.mark.parametrize("number", range(len(COMBINATIONS)), ids=[" + ".join(made.values()) for made in COMBINATIONS])
def test_each_option_combination_delivers_changes_that_the_model_predicts(
    outcome: Callable[[int], tuple[Any, Any]], number: int
) -> None:
    found, expected = outcome(number)
    assert found == expected


def test_combinations_contain_every_compatible_pair_of_options() -> None:
    every = [(name, value) for name, values in FACTORS.items() for value in values]
    wanted = {frozenset(pair) for pair in combinations(every, 2) if pair[0][0] != pair[1][0] and fits(dict(pair))}
    assert wanted == set().union(*map(pairs, COMBINATIONS)) and all(map(fits, COMBINATIONS))
