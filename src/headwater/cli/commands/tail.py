"""`headwater tail`: changes of a running server as they are committed, one line each."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

from headwater.cli.failure import OK
from headwater.cli.filters import add_filters, add_images, filters, find_target, natural, start
from headwater.cli.output.tables import add_output
from headwater.cli.remote import add_server, open_remote
from headwater.model.control_events import LAST_EVENTS, ControlEvent
from headwater.model.formats import PLAIN
from headwater.model.quantity import counted

if TYPE_CHECKING:
    from headwater.cli.feed import Feed
    from headwater.client.sse import Frame

BOTH = {"before": True, "after": True}


def add(commands: Any) -> None:
    """Register `tail`."""
    parser = commands.add_parser("tail", help="watch changes as they are committed", allow_abbrev=False)
    add_filters(parser)
    parser.add_argument(
        "--since",
        type=start,
        default="latest",
        metavar="WHEN",
        help="10m, 2h, an ISO time, earliest, offset:N, snapshot",
    )
    add_images(parser)
    parser.add_argument("--limit", type=natural, metavar="N", help="end after N changes")
    parser.add_argument("--no-color", action="store_true", help="no colours, on a terminal too")
    parser.add_argument("-v", "--verbose", action="store_true", help="report progress on standard error")
    add_server(parser)
    add_output(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    printer = Printer(raw=args.output == "json" or args.format is not None, plain=args.no_color)
    notes = StderrNotes(verbose=args.verbose)
    feed = _feed(args, notes)
    left = sys.maxsize if args.limit is None else args.limit
    with closing(feed.follow()) as batches:
        next(batches)
        notes.verbose(f"following {feed}")
        for frames in batches:
            for frame in frames:
                if left and not notes.take(frame):
                    printer.change(frame)
                    left -= 1
            sys.stdout.flush()
            if not left:
                break
    return OK


def _feed(args: argparse.Namespace, notes: StderrNotes) -> Feed:
    from headwater.cli.feed import Feed

    with closing(open_remote(args)) as remote:
        target = find_target(remote, args.table)
        params = {"include": BOTH, "format": PLAIN} | filters(args, target)
        query = {name: value for name, value in params.items() if name not in ("db", "table")}
        last_id = ""
        match args.since:
            case {"ts": int(ms)}:
                query["ts"] = ms
            case {"offset": int(offset)}:
                last_id = str(offset)
            case "latest":  # as an offset, so that a connection lost before the first change misses nothing
                last_id = str(remote.call("cdc.backtest", **params, start="latest")["from_offset"])
            case word:
                query["start"] = word
    return Feed(remote.url, target, query, last_id=last_id, token=remote.token, tls=remote.tls, notice=notes.say)


class Printer:
    """Prints changes to standard output: the JSON as received, or a readable line, in colour on a terminal."""

    def __init__(self, *, raw: bool, plain: bool) -> None:
        self._raw = raw
        self._console: Any = None
        if not raw and not plain and sys.stdout.isatty():
            from rich.console import Console

            self._console = Console(highlight=False)

    def change(self, frame: Frame) -> None:
        """Print one change."""
        if self._raw:
            print(frame.data.decode())
            return
        from headwater.cli.output.changes import colour, line

        found = json.loads(frame.data)
        if self._console is None:
            print(line(found))
        else:
            self._console.print(line(found), style=colour(found) or None, markup=False, soft_wrap=True)


class StderrNotes:
    """Prints everything except changes to standard error."""

    def __init__(self, *, verbose: bool) -> None:
        self._verbose = verbose

    def say(self, text: str) -> None:
        """Print a notice."""
        print(f"headwater tail: {text}", file=sys.stderr, flush=True)

    def verbose(self, text: str) -> None:
        """Print a notice if --verbose is given."""
        if self._verbose:
            self.say(text)

    def take(self, frame: Frame) -> bool:
        """Return whether `frame` is a control event, and print it; raise Failure if it ends the feed."""
        from headwater.cli.feed import ended, lost
        from headwater.cli.output.changes import OPS

        if frame.word in OPS:
            return False
        body = json.loads(frame.data)
        if frame.word in LAST_EVENTS:
            raise lost(body) if frame.word == ControlEvent.RESNAPSHOT else ended(body)
        if frame.word == ControlEvent.SNAPSHOT_RESTART:
            self.say(f"the snapshot restarts, its rows are sent again ({body['reason']})")
        else:
            self.verbose(_notice(frame.word, body))
        return True


def _notice(word: str, body: dict[str, Any]) -> str:
    match word:
        case ControlEvent.CHECKPOINT:
            return f"checkpoint: everything up to {body['ts']} is here, offset {body['offset']}"
        case ControlEvent.CAUGHT_UP:
            return f"caught up at offset {body['offset']}"
        case ControlEvent.SNAPSHOT_END:
            return f"these were all rows ({counted(body['rows'], 'row')}); now changes after offset {body['offset']}"
        case _:
            return f"{word}: {json.dumps(body)}"
