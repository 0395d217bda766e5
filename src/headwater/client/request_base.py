"""What both clients share: where the server is, who asks, and how pulls and feeds begin."""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from headwater.client.protocol import find_token, lost, parse_url, read
from headwater.client.pull_state import LogPull, SnapshotPull, Walk
from headwater.client.responses import Page, Range
from headwater.client.retry import Patience
from headwater.client.sse import Feed
from headwater.errors import InvalidRequest
from headwater.model.keys.key import Span

JSON_FORMATS = ("plain_json", "objects_json")


class Asking:
    """The settings of a client, and what it builds from them."""

    def __init__(
        self,
        url: str,
        token: str | None,
        token_file: str | os.PathLike[str] | None,
        patience: float,
        jitter: random.Random | None,
    ) -> None:
        self.server = parse_url(url)
        self.token = find_token(token, token_file, os.environ)
        self._patience, self._jitter = patience, jitter or random.Random()

    def patience(self) -> Patience:
        """For one thing that is tried again."""
        return Patience(self._patience, self._jitter)

    def snapshot(
        self,
        db: str,
        table: str,
        version: str,
        span: Span,
        columns: Sequence[str],
        where: str | None,
        ranges: Sequence[Range],
    ) -> SnapshotPull:
        """Rows of `span` as of `version`."""
        query = {"version": version, "columns": list(columns) or None, "where": where}
        return SnapshotPull(["pull", db, table, "snapshot"], query, Walk(span, ranges), self.patience())

    def log(
        self,
        db: str,
        table: str,
        generation: str,
        after: int,
        upto: int,
        span: Span | None,
        shape: int | None,
        columns: Sequence[str],
        where: str | None,
    ) -> LogPull:
        """Changes of one table in (after, upto]."""
        bounds: dict[str, Any] = {} if span is None else {"start": span.start or None, "end": span.end}
        query: dict[str, Any] = {"after": after, "upto": upto, "generation": generation, "shape": shape, **bounds}
        query |= {"columns": list(columns) or None, "where": where, "compression": "lz4"}
        return LogPull(["pull", db, table, "log"], query, self.patience())

    def log_tables(self, db: str, tables: Sequence[str], generation: str, after: int, upto: int) -> LogPull:
        """Changes of several tables in (after, upto]; no names are all tables."""
        query: dict[str, Any] = {"tables": list(tables) or "*", "after": after, "upto": upto, "generation": generation}
        return LogPull(["pull", db, "log"], query, self.patience())

    def changes(self, db: str, table: str | None, control: Collection[str], filters: Mapping[str, Any]) -> Feed:
        """Changes as they come, without a subscription."""
        query = {"format": "plain_json", **filters}
        parts = ["changes", db] if table is None else ["changes", db, table]
        return Feed(parts, query, self.patience(), control)

    def stream(self, sub_id: str, from_offset: int | None, control: Collection[str]) -> Feed:
        """A subscription's changes as they come."""
        return Feed(["cdc", "sse", sub_id], {"from_offset": from_offset}, self.patience(), control)


def page_of(found: Any) -> Page:
    """The page of a poll; a lost place is raised."""
    if found.get("resnapshot_required"):
        raise lost(found)
    return read(found, Page)


def check_follow(filters: Mapping[str, Any]) -> None:
    """InvalidRequest for what `follow` decides itself, or could not read."""
    taken = {"start", "from_offset", "ts", "upto", "control"}.intersection(filters)
    if taken:
        raise InvalidRequest(f"follow takes no {sorted(taken)[0]!r}", hint="It begins with a snapshot and never ends.")
    if filters.get("format", JSON_FORMATS[0]) not in JSON_FORMATS:
        raise InvalidRequest("follow reads no envelopes of others", hint=f"Use one of {JSON_FORMATS}.")
