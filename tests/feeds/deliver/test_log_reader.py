"""Pages of the log: together they contain every passing change, in order, with any limits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.feeds.feed_database import FILTERS, ITEMS, WITHOUT_SIZE, Fed, Writer, insert

from headwater.errors import InvalidRequest, OffsetExpired, TransactionTooLarge
from headwater.feeds.groups.log_reader import Delivery, Page, View, pull_url
from headwater.feeds.subscriptions.subscribe_table import SubscribeTable, check
from headwater.model.change import Change, Op
from headwater.serve.http.query_string import changes_asked, parse_query
from headwater.serve.http.routes import FILTERS as OF_CHANGES

BIG = 1 << 40


def history(seed: int, *, largest: int = 40, count: int = 60, part: int = 512) -> Fed:
    fed = Fed(part=part, keep_changes=64)
    Writer(fed, seed, keys=30, largest=largest).write(count)
    if seed % 2:
        fed.log.flush()  # older changes are then read from the log on disk
    return fed


def ends(fed: Fed) -> dict[int, int]:
    """Return the last offset of every transaction and its timestamp."""
    return {part.upto: part.ts for part in fed.log.scan(after=0) if part.last}


def begins(fed: Fed) -> dict[int, int]:
    """Return for every offset the first offset of its transaction."""
    found = {}
    for part in fed.log.scan(after=0):
        found.update(dict.fromkeys(range(part.first, part.upto + 1), part.first - part.start))
    return found


def pages(fed: Fed, read: Any, view: View, chance: random.Random, **bounds: Any) -> Iterator[Page]:
    """Read all pages from the beginning, each with its own limits."""
    after = 0
    while after < fed.log.latest:
        drawn = {name: chance.choice(choices) for name, choices in bounds.items()}
        page = read(view, fed.log, after=after, **drawn)
        assert page.upto > after, "a page must get on"
        assert page.size == sum(len(delivery.data) for delivery in page.deliveries)
        assert all(after < delivery.offset <= page.upto for delivery in page.deliveries)
        yield page
        after = page.upto


def news(offset: int, table: object, row: Any) -> bool:
    return offset > 30 + 7 * (row[0] % 5 if isinstance(row[0], int) else 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("newer", [None, news])
def test_pages_contain_every_passing_change(seed: int, newer: Any) -> None:
    fed = history(seed, part=7 if seed % 3 == 0 else 512)
    known, chance = ends(fed), random.Random(seed)
    for options in FILTERS:
        view = fed.view(**options)
        found: list[Delivery] = []
        for page in pages(
            fed,
            View.page,
            view,
            chance,
            limit=[1, 3, 20, 1000],
            most=[1, 300, BIG],
            scan=[1, 20, 512, BIG],
            newer=[newer],
        ):
            found += page.deliveries
            assert page.ts == known.get(page.upto, 0), "a time is given where a transaction ends, and only there"
        assert found == fed.expected(view, newer=newer), options


@pytest.mark.parametrize("limit", [1, 2, 5, 100])
def test_page_respects_its_limits(limit: int) -> None:
    fed = history(1)
    view = fed.view()
    page = view.page(fed.log, after=3, limit=limit, most=BIG)
    assert page.deliveries == fed.expected(view, after=3)[:limit]
    assert page.upto == 3 + limit


def test_page_ends_at_the_change_that_reaches_the_byte_limit() -> None:
    fed = history(1)
    view = fed.view()
    first, second, *_ = fed.expected(view)
    one = view.page(fed.log, after=0, limit=100, most=len(first.data))
    two = view.page(fed.log, after=0, limit=100, most=len(first.data) + 1)
    assert (one.deliveries, two.deliveries) == ([first], [first, second])


def test_page_ends_at_upto() -> None:
    fed = history(2)
    for upto in (1, 7, 100, fed.log.latest, fed.log.latest + 5):
        page = fed.view().page(fed.log, after=0, upto=upto, limit=10**6, most=BIG, scan=10**6)
        assert page.upto == min(upto, fed.log.latest)
        assert page.deliveries == fed.expected(fed.view(), upto=upto)


def test_page_at_the_head_is_empty_and_does_not_advance() -> None:
    fed = history(2)
    latest = fed.log.latest
    for read in (View.page, View.whole_page):
        assert read(fed.view(), fed.log, after=latest, limit=5, most=BIG) == Page([], latest, 0)


def test_filter_that_passes_nothing_advances_by_the_scan_limit() -> None:
    fed = Fed()
    for first in range(0, 4000, 400):
        fed.commit(*(insert(id) for id in range(first, first + 400)))
    view = fed.view(tables=("items",), where="size = 99")
    page = view.page(fed.log, after=0, limit=10, most=BIG, scan=1000)
    assert page.deliveries == [] and 1000 <= page.upto < 2000


def test_evicted_offset_raises_offset_expired() -> None:
    fed = history(2)
    fed.log.flush()
    fed.trim(20)
    for read in (View.page, View.whole_page):
        with pytest.raises(OffsetExpired):
            read(fed.view(), fed.log, after=fed.log.horizon - 2, limit=5, most=BIG)
        assert read(fed.view(), fed.log, after=fed.log.horizon - 1, limit=5, most=BIG).deliveries


# --- whole transactions ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("newer", [None, news])
def test_atomic_pages_contain_every_passing_change_and_split_no_transaction(seed: int, newer: Any) -> None:
    fed = history(seed, part=7 if seed % 3 == 0 else 512)
    known, began, chance = ends(fed), begins(fed), random.Random(seed)
    for options in FILTERS:
        view = fed.view(**options, txn="atomic")
        found: list[Delivery] = []
        last = -1
        for page in pages(
            fed,
            View.whole_page,
            view,
            chance,
            limit=[1, 3, 20, 1000],
            most=[1, 300, BIG],
            scan=[1, 20, BIG],
            newer=[newer],
        ):
            found += page.deliveries
            if page.deliveries:
                assert began[page.deliveries[0].offset] != last, "a transaction was split between two pages"
                last = began[page.deliveries[-1].offset]
            assert page.ts == known.get(page.upto, 0)
        assert found == fed.expected(view, newer=newer), options


def test_atomic_page_has_at_least_one_transaction_and_as_many_as_its_limits_allow() -> None:
    fed = Fed()
    for first, size in ((0, 4), (10, 3), (20, 5)):
        fed.commit(*(insert(id) for id in range(first, first + size)))
    view = fed.view(txn="atomic")

    def counted(limit: int, most: int = BIG) -> int:
        return len(view.whole_page(fed.log, after=0, limit=limit, most=most).deliveries)

    assert [counted(limit) for limit in (1, 4, 6, 7, 11, 12, 99)] == [4, 4, 4, 7, 7, 12, 12]
    size = sum(len(delivery.data) for delivery in fed.expected(view)[:7])
    assert [counted(99, most) for most in (1, size - 1, size, size + 1)] == [4, 4, 7, 7]


@pytest.mark.parametrize("parts", [512, 3])
def test_transaction_above_the_size_limit_is_split(parts: int) -> None:
    fed = Fed(part=parts)
    fed.commit(*(insert(id) for id in range(20)))
    fed.commit(insert(50))
    view = fed.view(txn="atomic")
    everything = fed.expected(view)
    largest = sum(len(delivery.data) for delivery in everything[:6])
    found: list[Delivery] = []
    sizes = []
    after = 0
    while after < fed.log.latest:
        page = view.whole_page(fed.log, after=after, limit=1, most=1, largest=largest)
        assert page.upto > after and page.size <= largest + len(everything[0].data) * 3
        sizes.append(len(page.deliveries))
        found += page.deliveries
        after = page.upto
    assert found == everything
    assert len(sizes) > 3


@pytest.mark.parametrize("parts", [512, 3])
def test_transaction_at_the_size_limit_stays_whole(parts: int) -> None:
    fed = Fed(part=parts)
    fed.commit(*(insert(id) for id in range(10, 30)))
    for txn in ("atomic", "atomic_strict"):
        view = fed.view(txn=txn)
        largest = sum(len(delivery.data) for delivery in fed.expected(view))
        page = view.whole_page(fed.log, after=0, limit=1, most=1, largest=largest)
        assert page.deliveries == fed.expected(view)


@pytest.mark.parametrize("parts", [512, 7])
def test_atomic_strict_reports_the_pull_url_of_a_large_transaction(parts: int) -> None:
    fed = Fed(part=parts)
    fed.commit(insert(1))
    fed.commit(*(insert(id) for id in range(10, 40)))
    fed.commit(insert(2))
    view = fed.view(tables=("items",), txn="atomic_strict")
    first = view.whole_page(fed.log, after=0, limit=50, most=2000, largest=2000)
    assert first.upto == 1, "the changes before it are delivered"
    with pytest.raises(TransactionTooLarge) as refused:
        view.whole_page(fed.log, after=1, limit=50, most=2000, largest=2000)
    details = refused.value.details
    assert (details["first_offset"], details["last_offset"]) == (2, 31)
    assert details["pull_url"] == "/api/v1/changes/main/items?from_offset=1&upto=31&include=after&format=objects_json"
    assert "2000 bytes" in refused.value.message
    after = view.whole_page(fed.log, after=31, limit=50, most=2000, largest=2000)
    assert [delivery.offset for delivery in after.deliveries] == [32]


def test_pull_url_of_a_large_transaction_is_quoted() -> None:
    odd = ITEMS.__class__("a table/é", ITEMS.columns, ITEMS.key)
    fed = Fed(odd)
    fed.commit(*(Change(Op.INSERT, odd, None, (id, 0, "")) for id in range(30)))
    view = fed.view(tables=("a table/é",), txn="atomic_strict")
    with pytest.raises(TransactionTooLarge) as refused:
        view.whole_page(fed.log, after=0, limit=5, most=100, largest=2000)
    url = refused.value.details["pull_url"]
    assert url.startswith("/api/v1/changes/main/a%20table%2F%C3%A9?from_offset=0&upto=30&")


ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"include": {}},
    {"include": {"before": True}, "format": "plain_json"},
    {"format": "debezium_json"},
    {"format": "cloudevents_json", "include": {}},
    {"ops": ["insert", "delete"], "columns": ["note", "size"]},
    {"where": "note LIKE '%a&b=é+ %' AND size > 2", "shard": {"index": 1, "of": 3}},
    {"pk": [{"t": "i64", "v": 2**62}]},
    {"pk_range": {"lower_bound": {"t": "i64", "v": -5}}},
    {"pk_range": {"lower_bound": {"t": "i64", "v": 1}, "upper_bound": {"t": "i64", "v": 2}}, "txn": "atomic_strict"},
    {"spans": [{"prefix": [{"t": "i64", "v": 1}]}, {"upper_bound": [{"t": "i64", "v": 0}]}]},
    {"table": "names", "spans": [{"prefix": [{"t": "str", "v": "é&="}]}, {"lower_bound": [{"t": "str", "v": "1"}]}]},
)


@pytest.mark.parametrize("given", ASKED)
def test_pull_url_of_a_large_transaction_has_the_subscribers_options(given: dict[str, Any]) -> None:
    fed = Fed()
    options = check(SubscribeTable(**{"table": "items", **given}), fed.source).options
    path, _, text = pull_url(options, after=4, upto=9).partition("?")
    query = parse_query(text.encode(), (*OF_CHANGES, "from_offset", "upto"), path)
    params, upto = changes_asked({"db": "main", "table": path.rpartition("/")[2]}, query)
    assert (query["from_offset"], upto) == ("4", 9)
    assert check(params, fed.source).options == msgspec.structs.replace(options, txn="")


def test_transaction_size_counts_passing_changes_only() -> None:
    fed = Fed(part=7)
    fed.commit(*(insert(id, size=id % 50) for id in range(100)))
    view = fed.view(tables=("items",), where="size = 4", txn="atomic_strict")
    page = view.whole_page(fed.log, after=0, limit=1, most=1, largest=1000)
    assert len(page.deliveries) == 2


@pytest.mark.parametrize("parts", [512, 100])
def test_whole_page_without_matches_advances_by_the_scan_limit(parts: int) -> None:
    """A huge transaction must not block a thread: no change of it was delivered, so a page may end inside it."""
    fed = Fed(part=parts)
    fed.commit(insert(1))
    fed.commit(*(insert(id, size=id // 2900) for id in range(10, 3010)))
    view = fed.view(tables=("items",), where="size = 1", txn="atomic")
    after, steps, found = 0, [], []
    while after < fed.log.latest:
        page = view.whole_page(fed.log, after=after, limit=10, most=BIG, scan=600)
        steps.append(page.upto - after)
        found += page.deliveries
        if page.deliveries:
            assert len(page.deliveries) == 110
        after = page.upto
    assert max(steps) <= 1300 and found == fed.expected(view)


# --- a filter that no longer fits --------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [View.page, View.whole_page])
def test_changes_before_the_drop_of_a_filter_column_are_delivered(read: Any) -> None:
    fed = Fed()
    for id in range(5):
        fed.commit(insert(id, size=9))
    fed.commit(Change(Op.SCHEMA_CHANGE, WITHOUT_SIZE))
    fed.commit(Change(Op.INSERT, WITHOUT_SIZE, None, (7, "")))
    view = fed.view(tables=("items",), where="size > 2", ops=("insert", "delete"))
    page = read(view, fed.log, after=0, limit=100, most=BIG)
    assert [delivery.offset for delivery in page.deliveries] == [1, 2, 3, 4, 5]
    assert 5 <= page.upto < 7
    with pytest.raises(InvalidRequest, match="does not fit"):
        read(view, fed.log, after=page.upto, limit=100, most=BIG)
