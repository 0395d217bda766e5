"""`headwater subscription` on a real server: subscriptions created, listed, moved, paused and closed."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.cli_process import Served, refused, run, run_json, served

from headwater.cli.commands.subscription import _every, _id, _remaining, _state, until
from headwater.cli.failure import Failure
from headwater.cli.remote import Remote

STATEMENTS = [
    "CREATE TABLE orders(id INTEGER PRIMARY KEY, total REAL)",
    "INSERT INTO orders VALUES (1, 10), (2, 200)",
    "UPDATE orders SET total = 300 WHERE id = 1",
    "DELETE FROM orders WHERE id = 2",
]
LATEST = 5


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("shop")) as server:
        remote = Remote(server.url)
        for statement in STATEMENTS:
            remote.call("sql.exec", sql=statement)
        remote.close()
        yield server


def subscription(server: Served, *args: str) -> str:
    """Return the output of a command; fail if it fails."""
    done = run("subscription", *args, "--server", server.url)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def subscription_json(server: Served, *args: str) -> Any:
    return run_json("subscription", *args, "--server", server.url)


def test_subscription_is_created_paused_resumed_moved_and_closed(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        remote = Remote(server.url)
        for statement in STATEMENTS:
            remote.call("sql.exec", sql=statement)
        remote.close()
        assert subscription(server, "list") == "no subscriptions\n"
        said = subscription(
            server, "create", "orders", "--where", "total > 100", "--name", "large", "--start", "earliest"
        )
        id = said.split()[0]
        assert said.splitlines()[0] == f"{id} follows orders after offset 0"
        assert f"/api/v1/cdc/sse/{id}" in said and f"/api/v1/cdc/ws/{id}" in said
        again = subscription(server, "create", "orders", "--where", "total > 100", "--name", "large")
        assert again.startswith(f"{id} was there already and follows orders after offset 0")
        headers, row = subscription(server, "list").splitlines()
        assert headers.split() == ["id", "name", "follows", "state", "lag", "acked", "expires"]
        assert row.split() == [id, "large", "main.orders", "healthy", str(LATEST), "0"]

        assert subscription(server, "pause", id) == f"{id} is paused after offset 0\n"
        shown = subscription(server, "show", id)
        for what in (r"state +paused", r"where +total > 100", r"lag +5 changes", r"until lost +\d", r"name +large"):
            assert re.search(rf"^{what}", shown, re.MULTILINE), what
        assert subscription(server, "resume", id) == f"{id} goes on after offset 0\n"
        assert subscription(server, "seek", id, "--offset", "3") == f"{id} goes on after offset 3\n"
        assert subscription(server, "seek", id, "--to", "1h") == f"{id} goes on after offset 0\n"
        assert subscription_json(server, "show", id)["state"] == "healthy"
        assert subscription(server, "close", id) == f"{id} is closed\n"
        assert f"unknown sub_id '{id}' (not_found)\nhint: " in refused(
            1, "subscription", "show", id, "--server", server.url
        )


def test_subscription_is_found_by_its_name(shop: Served) -> None:
    id = subscription(shop, "create", "orders", "--name", "sub_of the shop").split()[0]
    assert subscription_json(shop, "show", "sub_of the shop")["sub_id"] == id
    for verb, said in (
        (("pause",), f"is paused after offset {LATEST}"),
        (("resume",), f"goes on after offset {LATEST}"),
        (("seek", "--offset", "3"), "goes on after offset 3"),
        (("close",), "is closed"),
    ):
        assert subscription(shop, *verb, "sub_of the shop") == f"{id} {said}\n"
    gone = refused(1, "subscription", "show", "sub_of the shop", "--server", shop.url)
    assert "there is no subscription named 'sub_of the shop'\nhint: " in gone


class Paged:
    """A server with three subscriptions, two to a page."""

    names = ("a", "b", "b")

    def call(self, method: str, after: str = "") -> Any:
        found = [{"sub_id": f"sub_{n:016x}", "name": name, "db": f"db{n}"} for n, name in enumerate(self.names)]
        rest = [each for each in found if each["sub_id"] > after]
        return {"subscriptions": rest[:2]} | ({"next": rest[1]["sub_id"]} if len(rest) > 2 else {})


def test_subscription_name_is_searched_on_every_page_and_an_ambiguous_name_is_refused() -> None:
    remote: Any = Paged()
    assert len(list(_every(remote))) == 3
    assert _id(remote, "a") == "sub_0000000000000000" and _id(remote, "sub_0000000000000009")[-1] == "9"
    with pytest.raises(Failure) as ambiguous:
        _id(remote, "b")
    assert "sub_0000000000000001 (of db1), sub_0000000000000002 (of db2)" in ambiguous.value.hint


def test_subscription_json_prints_the_answers_of_the_server(shop: Served) -> None:
    made = subscription_json(
        shop, "create", "main.orders", "--pk", "1", "--op", "update,delete", "--format", "plain_json"
    )
    assert made["created"] and made["offset"] == LATEST
    (listed,) = subscription_json(shop, "list", "--db", "main")
    assert listed["options"]["pk"] == [{"t": "i64", "v": 1}] and listed["options"]["ops"] == ["delete", "update"]
    assert subscription_json(shop, "show", made["sub_id"])["acked_offset"] == LATEST
    moved = subscription_json(shop, "seek", made["sub_id"], "--offset", "2")
    assert moved == {"sub_id": made["sub_id"], "acked_offset": 2}
    assert subscription_json(shop, "pause", made["sub_id"])["paused"] is True
    assert subscription_json(shop, "close", made["sub_id"])["closed"] is True


def test_backtest_prints_the_matching_changes(shop: Served) -> None:
    first, second, *samples = subscription(shop, "backtest", "orders", "--where", "total > 100").splitlines()
    assert first.startswith("4 of 5 changes match (1 schema_change, 2 insert, 1 delete), ") and second == "the newest:"
    assert [line.split()[0] for line in samples] == ["1", "3", "4", "5"]
    found = subscription_json(shop, "backtest", "orders", "--op", "insert", "--since", "offset:2")
    assert (found["matches"], found["scanned"]) == (1, 3)
    assert found["samples"][0]["after"] == {"id": 2, "total": 200.0}
    raw = subscription(shop, "backtest", "orders", "--op", "update", "--format", "debezium_json").splitlines()[-1]
    assert json.loads(raw)["op"] == "u"
    nothing = subscription(shop, "backtest", "orders", "--op", "truncate")
    assert nothing == "0 of 5 changes match, 0 B\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("create", "ordrs"), "Did you mean main.orders?"),
        (("create", "orders", "--where", "nowhere = 1"), "no such column: nowhere"),
        (("create", "orders", "--start", "offset:99"), "beyond the latest offset"),
        (("pause", "sub_0000000000000099"), "hint: "),
        (("seek", "sub_0000000000000099", "--offset", "1"), "not_found"),
        (("backtest", "orders", "--since", "snapshot"), "a backtest reads changes"),
    ],
)
def test_refusal_of_the_server_is_printed_with_its_remedy(shop: Served, args: tuple[str, ...], said: str) -> None:
    assert said in refused(1, "subscription", *args, "--server", shop.url)


@pytest.mark.parametrize(
    "args", [(), ("seek", "sub_1"), ("seek", "sub_1", "--offset", "1", "--to", "1h"), ("seek", "sub_1", "--to", "then")]
)
def test_wrong_subscription_usage_exits_with_2(args: tuple[str, ...]) -> None:
    refused(2, "subscription", *args)


def test_subscription_command_without_a_server_exits_with_3() -> None:
    refused(3, "subscription", "list", "--server", "http://127.0.0.1:1")


def test_future_times_are_printed_in_words() -> None:
    now = 1_000_000
    passed = {0: "now", 999: "now", 1000: "in 1 s", 59_999: "in 59 s", 60_000: "in 1 min", 3 * 3_600_000: "in 3 h"}
    assert {ms: until(now + ms, now) for ms in passed} == passed
    assert until(now + 2000 * 86_400_000, now) == "in 2,000 d"
    assert until(now - 5, now) == "now" and until(None) == ""


def test_subscription_states_are_printed_in_words() -> None:
    assert _state({"state": "healthy", "paused": False}) == "healthy"
    assert _state({"state": "resnapshot_required", "paused": True}) == "resnapshot required, paused"
    reading = {"state": "paused", "paused": True, "snapshot": {"done": False}}
    assert _state(reading) == "paused, reads its snapshot"
    assert (_remaining(1), _remaining(2**63 - 2)) == ("1 change", "any number of changes")
