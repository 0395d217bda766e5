"""Random options of readers: every transport and every filter is among them."""

from __future__ import annotations

import random
from typing import Any

from tests.guarantees.feed_oracle import Spec

TRANSPORTS = ("poll", "long_poll", "sse", "sse", "websocket", "websocket", "ndjson", "changes_sse")
WHERES = (
    ("item", "n > 30"),
    ("item", "name LIKE 'a%' OR price IS NULL"),
    ("item", "n BETWEEN 10 AND 40 AND name <> ''"),
    ("item", "coalesce(price, 1) * 2 > 0.5"),
    ("item", "length(name) > 2 AND id % 2 = 0"),
    ("item", "name = 'Ann' COLLATE NOCASE"),
    ("pair", "v > 0"),
    ("pair", "typeof(v) = 'text' OR b IN (1, 3)"),
    ("ledger", "n % 2"),
    ("line", "x = 0"),
)


Wheres = tuple[tuple[str, str], ...]


def specs(dice: random.Random, number: int, wheres: Wheres = WHERES) -> list[Spec]:
    """Return one spec of each transport, then random ones; the first receives everything from the beginning."""
    transports = list(dict.fromkeys(TRANSPORTS))
    transports += [dice.choice(TRANSPORTS) for _ in range(number - len(transports))]
    found = [Spec(transport="sse", start="earliest")]
    return found + [_spec(dice, transport, wheres) for transport in transports[: number - 1]]


def _spec(dice: random.Random, transport: str, wheres: Wheres) -> Spec:
    start = dice.choice(("earliest", "latest", "snapshot", "snapshot"))
    both = start == "snapshot" or dice.random() < 0.8
    more = _filter(dice, wheres)
    if transport in ("ndjson", "changes_sse") and len(more.get("tables", ())) > 1:
        more["tables"] = more["tables"][:1]
    if start == "snapshot":
        more.pop("ops", None)
    atomic = transport in ("poll", "long_poll") and dice.random() < 0.4
    return Spec(
        transport=transport,
        start=start,
        before=dice.random() < 0.8,
        after=both,
        format=dice.choice(("objects_json", "plain_json")),
        atomic=atomic,
        **more,
    )


def _filter(dice: random.Random, wheres: Wheres) -> dict[str, Any]:
    low = dice.randrange(40)
    match dice.randrange(11):
        case 0:
            return {}
        case 1:
            return {"tables": ("item", "pair"), "shard": (dice.randrange(2), 2)}
        case 2:
            params = {"pk": [{"t": "i64", "v": low}]}
            return {"tables": ("item",), "params": params, "condition": f"id = {low}"}
        case 3:
            params = {"pk_range": {"lower_bound": {"t": "i64", "v": low}, "upper_bound": {"t": "i64", "v": low + 15}}}
            return {"tables": ("item",), "params": params, "condition": f"id BETWEEN {low} AND {low + 15}"}
        case 4:
            return {"tables": ("pair",), **_spans(dice)}
        case 5 | 6 | 7:
            table, where = dice.choice(wheres)
            return {"tables": (table,), "params": {"where": where}, "condition": where}
        case 8:
            return {"tables": ("item",), "columns": ("n", "name")}
        case 9:
            table, where = wheres[0]
            return {"tables": (table,), "params": {"where": where}, "condition": where, "columns": ("mark", "n")}
        case _:
            return {"tables": ("item", "ledger"), "ops": ("delete", "insert")}


def _spans(dice: random.Random) -> dict[str, Any]:
    letter = dice.choice("bcd")
    lit = {"t": "str", "v": letter}
    spans: list[dict[str, Any]] = [
        {"prefix": [{"t": "str", "v": "a"}]},
        {"lower_bound": [lit, {"t": "i64", "v": 2}], "upper_bound": [{"t": "str", "v": "e"}]},
    ]
    condition = f"a = 'a' OR ((a, b) >= ('{letter}', 2) AND a <= 'e')"
    return {"params": {"spans": spans}, "condition": condition}
