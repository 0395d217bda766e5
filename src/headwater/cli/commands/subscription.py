"""`headwater subscription`: list, try, create and move durable subscriptions of a running server."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime
from typing import Any

from headwater.cli.failure import OK, Failure
from headwater.cli.filters import add_filters, add_images, filters, find_target, moment, natural, start
from headwater.cli.output.tables import as_text, print_json, print_result, print_table, printable
from headwater.cli.remote import Remote, add_verb, open_remote
from headwater.model.formats import PLAIN
from headwater.model.quantity import amount, byte_size, counted

COLUMNS = ("id", "name", "follows", "state", "lag", "acked", "expires")
UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
NO_LIMIT = 2**62  # changes: a log that is not bounded by their number
ID = re.compile(r"sub_[0-9a-f]{16}")
HIDDEN = ("db", "tables", "format")  # of the options: shown by themselves

Work = Callable[[Remote, argparse.Namespace], Any]
Show = Callable[[Any, argparse.Namespace], None]


def add(commands: Any) -> None:
    """Register `subscription`."""
    group = commands.add_parser("subscription", help="durable subscriptions").add_subparsers(dest="verb", required=True)
    every = _verb(group, "list", "list subscriptions with state and lag", _list, _show_list)
    every.add_argument("--db", metavar="NAME", help="only those of this database")
    _of_one(_verb(group, "show", "everything about one", _one, _show_one))
    _of_one(_verb(group, "pause", "deliver nothing for now", _call("cdc.pause"), _say("is paused after offset")))
    _of_one(_verb(group, "resume", "deliver again", _call("cdc.resume"), _say("goes on after offset")))
    seek = _verb(group, "seek", "continue from another offset, forwards or back", _seek, _say("goes on after offset"))
    _of_one(seek)
    where = seek.add_mutually_exclusive_group(required=True)
    where.add_argument("--offset", type=natural, metavar="N", help="continue with the change after offset N")
    where.add_argument("--to", type=moment, metavar="TIME", help="continue with changes after 10m (ago), an ISO time")
    _of_one(_verb(group, "close", "delete it", _call("cdc.close"), _say("is closed")))
    create = _verb(group, "create", "create one", _create, _show_created)
    add_filters(create)
    add_images(create)
    create.add_argument("--name", metavar="NAME", help="its name; create it again to get the same one")
    create.add_argument(
        "--start", type=start, metavar="WHEN", help="latest, earliest, snapshot, offset:N, 10m (ago), an ISO time"
    )
    backtest = _verb(
        group, "backtest", "changes one would have delivered, without creating it", _backtest, _show_backtest
    )
    add_filters(backtest)
    add_images(backtest)
    backtest.add_argument("--since", type=start, metavar="WHEN", help="begin there, not with the oldest change")


def _verb(group: Any, name: str, text: str, work: Work, show: Show) -> argparse.ArgumentParser:
    parser = add_verb(group, name, text, _run)
    parser.set_defaults(work=work, show=show)
    return parser


def _of_one(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="the subscription: sub_…, or its name")


def _run(args: argparse.Namespace) -> int:
    with closing(open_remote(args)) as remote:
        answer = args.work(remote, args)
    if args.output == "json":
        print_json(answer)
    else:
        args.show(answer, args)
    return OK


# --- calls -----------------------------------------------------------------------------------------------


def _list(remote: Remote, args: argparse.Namespace) -> Any:
    return list(_every(remote, **({} if args.db is None else {"db": args.db})))


def _every(remote: Remote, **given: Any) -> Iterator[dict[str, Any]]:
    """Yield all subscriptions, page by page."""
    while True:
        page = remote.call("cdc.list", **given)
        yield from page["subscriptions"]
        if "next" not in page:
            return
        given["after"] = page["next"]


def _id(remote: Remote, text: str) -> str:
    """Return the id of the subscription with this id or name; Failure if none, or several, have the name."""
    if ID.fullmatch(text):
        return text
    found = [each for each in _every(remote) if each["name"] == text]
    if not found:
        raise Failure(f"there is no subscription named {text!r}", hint="headwater subscription list shows them all.")
    if len(found) > 1:
        ids = ", ".join(f"{each['sub_id']} (of {each['db']})" for each in found)
        raise Failure(f"several databases have a subscription named {text!r}", hint=f"Name it by its id: {ids}.")
    return str(found[0]["sub_id"])


def _one(remote: Remote, args: argparse.Namespace) -> Any:
    return remote.call("cdc.list", sub_id=_id(remote, args.id))["subscriptions"][0]


def _call(method: str) -> Work:
    return lambda remote, args: remote.call(method, sub_id=_id(remote, args.id))


def _seek(remote: Remote, args: argparse.Namespace) -> Any:
    to = {"offset": args.offset} if args.offset is not None else {"ts": args.to}
    return remote.call("cdc.seek", sub_id=_id(remote, args.id), **to)


def _create(remote: Remote, args: argparse.Namespace) -> Any:
    params = filters(args, find_target(remote, args.table))
    given = {"name": args.name, "start": args.start}
    return remote.call(
        "cdc.subscribe_table", **params, **{name: each for name, each in given.items() if each is not None}
    )


def _backtest(remote: Remote, args: argparse.Namespace) -> Any:
    shown = {"include": {"before": True, "after": True}, "format": PLAIN}
    params = shown | filters(args, find_target(remote, args.table))
    return remote.call("cdc.backtest", **params, **({} if args.since is None else {"start": args.since}))


# --- output ----------------------------------------------------------------------------------------------


def _show_list(answer: Any, args: argparse.Namespace) -> None:
    print_result(args.output, answer, COLUMNS, [_row(each) for each in answer], nothing="no subscriptions")


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    return (
        each["sub_id"],
        each["name"] or "",
        _follows(each),
        _state(each),
        amount(each["lag"]),
        amount(each["acked_offset"]),
        "" if each["state"] == "healthy" else until(each.get("will_expire_at_ms")),
    )


def _follows(each: dict[str, Any]) -> str:
    return ", ".join(f"{each['db']}.{table}" for table in each["tables"] or ["*"])


def _state(each: dict[str, Any]) -> str:
    """Return the state that the server reports, with "paused" and "reads its snapshot" where they also apply."""
    words = [each["state"].replace("_", " ")]
    if each["paused"] and each["state"] != "paused":
        words.append("paused")
    if not each.get("snapshot", {"done": True})["done"]:
        words.append("reads its snapshot")
    return ", ".join(words)


def _show_one(answer: Any, args: argparse.Namespace) -> None:
    filters = [(name, as_text(value)) for name, value in answer["options"].items() if name not in HIDDEN]
    facts = [
        ("id", answer["sub_id"]),
        ("name", answer["name"] or ""),
        ("follows", _follows(answer)),
        ("format", answer["format"]),
        *filters,
        ("state", _state(answer)),
        ("lag", counted(answer["lag"], "change")),
        ("acked offset", amount(answer["acked_offset"])),
        ("until lost", _remaining(answer["remaining_until_resnapshot"])),
        ("expires", until(answer.get("will_expire_at_ms")) or "not at this pace"),
        ("created", datetime.fromtimestamp(answer["created_ms"] / 1000).isoformat(" ", "seconds")),
    ]
    print_table(("what", "value"), facts)


def _remaining(changes: int) -> str:
    return counted(changes, "change") if changes < NO_LIMIT else "any number of changes"


def until(ms: int | None, now_ms: int | None = None) -> str:
    """Return the time until `ms`, as `in 3 h`, or `now`; "" for None."""
    if ms is None:
        return ""
    seconds = (ms - (time.time_ns() // 1_000_000 if now_ms is None else now_ms)) / 1000
    for length, unit in UNITS:
        if seconds >= length:
            return f"in {int(seconds // length):,} {unit}"
    return "now"


def _say(what: str) -> Show:
    def show(answer: Any, args: argparse.Namespace) -> None:
        offset = f" {answer['acked_offset']}" if "acked_offset" in answer else ""
        print(f"{answer['sub_id']} {what}{offset}")

    return show


def _show_created(answer: Any, args: argparse.Namespace) -> None:
    made = "follows" if answer["created"] else "was there already and follows"
    print(f"{answer['sub_id']} {made} {args.table} after offset {answer['offset']}")
    print(f"server-sent events: {answer['sse_url']}\nWebSocket: {answer['ws_url']}")


def _show_backtest(answer: Any, args: argparse.Namespace) -> None:
    from headwater.cli.output.changes import line

    ops = ", ".join(f"{amount(count)} {word}" for word, count in answer["ops"].items())
    matched = f"{amount(answer['matches'])} of {counted(answer['scanned'], 'change')} match"
    print(f"{matched}{f' ({ops})' if ops else ''}, {byte_size(answer['bytes'])}")
    if not answer["complete"]:
        print(f"it took too long: this is up to offset {answer['upto_offset']}; go on with --since there")
    if answer["samples"]:
        print("the newest:")
    for sample in answer["samples"]:
        print(line(sample) if args.format is None else printable(json.dumps(sample, ensure_ascii=False)))
