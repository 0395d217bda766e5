"""`headwater debug changefeed`: prints the change feed of some keys, and reconnects until it is stopped."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from headwater.cli.commands.config import add_token_file, credential, load_config
from headwater.cli.failure import OK, UNREACHABLE, USAGE, Failure
from headwater.cli.filters import EVERY, MAIN, key, moment, natural
from headwater.cli.output.tables import add_output
from headwater.model.clock import Timestamp, parse_ts, ts_of_ms

if TYPE_CHECKING:
    from headwater.serve.grpc.changefeed_client import ServerConnection

RETRY_SECONDS = 1.0
OFFSET = "offset:"


def add(commands: Any) -> None:
    """Register `debug`."""
    group = commands.add_parser("debug", help="inspect a running server").add_subparsers(dest="verb", required=True)
    parser = group.add_parser("changefeed", help="print the change feed of some keys", allow_abbrev=False)
    parser.add_argument("table", metavar="[DB.]TABLE", help="a table; DB.* is all of a database")
    parser.add_argument("span", nargs="?", metavar="SPAN", help="a key, or LOW..HIGH with both; JSON, [1, 2] for parts")
    parser.add_argument("--base", metavar="WHEN", help="begin after 10m, an ISO time, MS.COUNTER or offset:N (now)")
    parser.add_argument("--until", metavar="WHEN", help="end when all changes up to then were received")
    parser.add_argument("--limit", type=natural, metavar="N", help="end after N values")
    parser.add_argument("--diff", action="store_true", help="show the row as it was, too")
    parser.add_argument("--skip-catchup", action="store_true", help="begin now, whatever the base")
    parser.add_argument("--once", action="store_true", help="do not reconnect")
    parser.add_argument("--grpc", metavar="HOST:PORT", help="the gRPC address of the server (127.0.0.1:7172)")
    parser.add_argument("--tls", action="store_true", help="use TLS (default if the settings here have a certificate)")
    parser.add_argument("--ca", metavar="FILE", help="authorities in PEM to trust instead of the usual")
    add_token_file(parser)
    add_output(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    until = None if args.until is None else _time(args.until, "--until")
    left = sys.maxsize if args.limit is None else args.limit
    with closing(_events(args)) as events:
        for event in events if left else ():
            print(json.dumps(event, ensure_ascii=False) if args.output == "json" else line(event), flush=True)
            left -= event["event"] == "value"
            is_checkpoint = event["event"] == "checkpoint" and "span" not in event
            if not left or (until is not None and is_checkpoint and parse_ts(event["ts"]) >= until):
                break
    return OK


def _events(args: argparse.Namespace) -> Generator[dict[str, Any], None, None]:
    """Yield the events of the feed; after a retryable end, reconnect from the last checkpoint."""
    from headwater.serve.grpc.changefeed_client import FeedEnded

    db, spans = asked_for(args.table, args.span)
    base, is_offset = _base(args.base)
    more = {"with_diff": args.diff, "skip_catchup": args.skip_catchup}
    answered = False
    with closing(_dial(args)) as server:
        while True:
            try:
                for event in server.feed(db, spans, base, is_offset=is_offset, **more):
                    answered = True
                    if event["event"] == "checkpoint" and "span" not in event:
                        base, is_offset = parse_ts(event["ts"]), False
                        more |= {"generation": event["generation"], "skip_catchup": False}
                    yield event
            except FeedEnded as ended:
                if not ended.retryable or args.once or not answered:
                    raise _failure(ended, args) from None
                print(f"headwater debug: {ended.message}; connecting again", file=sys.stderr, flush=True)
                time.sleep(max(ended.wait_ms / 1000, RETRY_SECONDS))


def _failure(ended: Any, args: argparse.Namespace) -> Failure:
    if ended.unreachable:
        hint = "Start one with `headwater serve`, or name another with --grpc."
        return Failure(f"no gRPC server answers at {_address(args)}: {ended.message}", hint=hint, exit_code=UNREACHABLE)
    if "Authentication" in ended.message:
        return Failure(ended.message, hint="Set HEADWATER_TOKEN, or name a file with --token-file.")
    return Failure(ended.message, hint=ended.hint)


# --- request ---------------------------------------------------------------------------------------------


def asked_for(table: str, span: str | None) -> tuple[str, list[dict[str, str]]]:
    """Return the database and the spans of a request; an empty list means the whole database."""
    db, dot, name = table.partition(".")
    db, name = (db, name) if dot else (MAIN, table)
    if name == EVERY:
        if span is not None:
            raise Failure("a span needs one table, not all", hint="Name the table.", exit_code=USAGE)
        return db, []
    found = {"table": name}
    if span is not None:
        found["keys"] = json.dumps(keys_of(span))
    return db, [found]


def keys_of(text: str) -> dict[str, Any]:
    """Return the keys of `KEY`, `LOW..HIGH`, `LOW..` or `..HIGH`."""
    from headwater.model.literal import from_json, to_lit

    def lits(part: str) -> list[Any]:
        return [to_lit(from_json(value)) for value in key(part)]

    low, dots, high = text.partition("..")
    if not dots:
        return {"prefix": lits(text)}
    bounds = {"lower_bound": low, "upper_bound": high}
    found = {name: lits(part) for name, part in bounds.items() if part}
    if not found:
        raise Failure("the span `..` has no key", hint="Write 5..9, 5.. or ..9; omit it for all keys.", exit_code=USAGE)
    return found


def _base(text: str | None) -> tuple[Timestamp | None, bool]:
    if text is None:
        return None, False
    if text.startswith(OFFSET):
        try:
            return natural(text.removeprefix(OFFSET)), True
        except argparse.ArgumentTypeError as error:
            raise Failure(f"--base: {error}", exit_code=USAGE) from None
    return _time(text, "--base"), False


def _time(text: str, flag: str) -> Timestamp:
    """Return the time of a checkpoint (MS.COUNTER), of `10m` (ago), or of an ISO time."""
    try:
        if text.partition(".")[0].isdigit():
            return parse_ts(text)
        return ts_of_ms(moment(text))
    except argparse.ArgumentTypeError as error:
        raise Failure(f"{flag}: {error}", hint="The ts of a checkpoint is valid, too.", exit_code=USAGE) from None


def _address(args: argparse.Namespace) -> str:
    found: str = args.grpc or load_config(args).serve.grpc
    return found


def _dial(args: argparse.Namespace) -> ServerConnection:
    import importlib.util

    if importlib.util.find_spec("grpc") is None:
        raise Failure("change feeds need the package grpcio", hint="pip install 'headwater[grpc]'")
    from headwater.serve.grpc.changefeed_client import ServerConnection

    config, address = load_config(args), _address(args)
    if address == "off":
        raise Failure("gRPC is off in the settings", hint="Name the address of a server with --grpc.", exit_code=USAGE)
    ca = args.ca or config.ca
    trusted = None
    if ca is not None:
        with open(ca, "rb") as file:
            trusted = file.read()
    tls = bool(args.tls or args.ca or (args.grpc is None and config.serve.tls_cert is not None))
    return ServerConnection(address, credential(config), tls=tls, ca=trusted)


# --- output ----------------------------------------------------------------------------------------------


def line(event: dict[str, Any]) -> str:
    """Return an event as a readable line."""
    from headwater.cli.output.tables import printable

    match event["event"]:
        case "value":
            row = event["value"]
            said = f"delete {_key(event['key'])}" if row is None else f"put {json.dumps(row, ensure_ascii=False)}"
            was = f"  was {json.dumps(event['prev_value'], ensure_ascii=False)}" if "prev_value" in event else ""
            words = f"{event['ts']}  {event['table']}  {said}{was}"
        case "checkpoint":
            words = f"-- checkpoint {event['ts']}  {_keys(event['span']) if 'span' in event else 'all'}"
        case "steady_state":
            words = f"-- steady at offset {event.get('offset', 0)}"
        case "delete_range":
            words = f"{event['ts']}  {_keys(event['span'])}  delete all"
        case "schema_change":
            words = f"{event['ts']}  {event['table']}  {event.get('ddl') or 'another shape'}"
        case _:
            words = f"-- {event.get('reason', 'INTERNAL')}: {event.get('message', '')}"
    return printable(words)


def _key(text: str) -> str:
    from headwater.errors import InvalidRequest
    from headwater.model.keys.key import decode_key

    try:
        return ", ".join(map(repr, decode_key(bytes.fromhex(text))))
    except InvalidRequest:  # folded by a collation, or of a type that cannot be decoded
        return text


def _keys(span: dict[str, Any]) -> str:
    if "start_key" not in span and "end_key" not in span:
        return str(span.get("table", ""))
    return f"{span.get('table', '')} [{span.get('start_key', '')}, {span.get('end_key', '')})"
