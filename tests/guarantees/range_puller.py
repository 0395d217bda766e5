"""A puller as in JimDB: it registers every range, pulls its rows, then its log, and never goes back.

Its progress is stored by keys, not by ranges, which may be split and merged during the pull.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc
from tests.suite.deadlines import PATIENCE

from headwater.serve.grpc.messages import message

SNAPSHOT, LOG = "snapshot", "log"


def own_message(name: str, **fields: Any) -> Any:
    """Return a message of the package headwater.v1 with these fields."""
    return message(f"headwater.v1.{name}")(**fields)


def ask(channel: grpc.Channel, method: str, request: Any, response: str, **more: Any) -> Any:
    """Return the answer of one call of the PullService."""
    path = f"/headwater.v1.PullService/{method}"
    read = message(f"headwater.v1.{response}").FromString
    call = channel.unary_unary(
        path, request_serializer=lambda each: each.SerializeToString(), response_deserializer=read
    )
    return call(request, timeout=PATIENCE, **more)


@dataclass(frozen=True)
class Section:
    """A range of keys and its progress."""

    start: bytes
    end: bytes  # empty: no end
    stage: str
    version: int  # as of which its rows are read
    index: int  # of the log: what it was registered at, then what was pulled
    last_key: bytes = b""


class Told(Exception):
    """The server answered with an error that the puller cannot continue from."""

    def __init__(self, error: Any) -> None:
        super().__init__(f"{error.WhichOneof('err')}: {error.detail}")
        self.kind = error.WhichOneof("err")
        self.error = error


class RangePuller:
    """Pulls `table` into `rows`; calls `channel` again after every failure, because the server may have restarted."""

    def __init__(
        self, channel: Callable[[], grpc.Channel], table: str, name: str = "puller", *, limit: int = 0
    ) -> None:
        self._channel, self._table, self._name, self._limit = channel, table, name, limit
        self._ranges: list[Any] = []
        self.sections: list[Section] = []
        self.rows: dict[bytes, Any] = {}
        self.since: dict[bytes, int] = {}  # key to the offset as of which its row is known
        self.open: dict[bytes, str] = {}  # by the start of a section: the transaction that has not ended
        self.renewed = 0  # how often a snapshot went on as of another version
        self.stale = 0  # how often ranges were others than thought
        self.changes = 0

    def begin(self) -> None:
        """Register every range."""
        self._list()
        for one in self._ranges:
            request = own_message("CdcRegisterRequest", **self._named(one))
            answer = ask(self._channel(), "CdcRegister", request, "CdcRegisterResponse")
            if answer.HasField("error"):
                raise Told(answer.error)
            version = answer.init_snapshot_version
            self.sections.append(Section(one.start_key, one.end_key, SNAPSHOT, version, version))

    @property
    def is_following(self) -> bool:
        """Return whether all rows are pulled."""
        return all(section.stage == LOG for section in self.sections)

    def round(self) -> bool:
        """Pull one page of every section; return whether anything arrived."""
        before = list(self.sections)
        for section in before:
            if section in self.sections:  # else it was cut meanwhile
                self._step(section)
        return self.sections != before

    def follow(self, upto: int) -> None:
        """Pull until everything up to `upto` has arrived."""
        while not self.is_following or any(section.index < upto for section in self.sections):
            self.round()

    def _list(self) -> None:
        request = own_message("ListRangesRequest", table=self._table)
        self._ranges = list(ask(self._channel(), "ListRanges", request, "ListRangesResponse").ranges)

    def _named(self, one: Any) -> dict[str, Any]:
        return {"range_id": one.id, "range_epoch": one.range_epoch, "subscriber_name": self._name}

    def _step(self, section: Section) -> None:
        one = self._holding(section)
        if one is None:
            return
        part = {"start_key": section.start, "end_key": section.end, "limit": self._limit, **self._named(one)}
        if section.stage == SNAPSHOT:
            request = own_message(
                "CdcPullSnapshotRequest",
                current_snapshot_version=section.version,
                last_key=section.last_key,
                **part,
            )
            answer = ask(self._channel(), "CdcPullSnapshot", request, "CdcPullSnapshotResponse")
        else:
            request = own_message("CdcPullLogRequest", last_log_index=section.index, **part)
            answer = ask(self._channel(), "CdcPullLog", request, "CdcPullLogResponse")
        if answer.HasField("error"):
            self._obey(answer.error)
        elif section.stage == SNAPSHOT:
            self._put(section, self._took_rows(section, answer))
        else:
            self._put(section, self._took_log(section, answer))

    def _obey(self, error: Any) -> None:
        kind = error.WhichOneof("err")
        if kind in ("stale_epoch", "range_not_found"):
            self.stale += 1
            self._list()
        elif not (kind == "server_error" and error.server_error.retryable):
            raise Told(error)

    def _holding(self, section: Section) -> Any:
        """Return the range that holds the section; if several do, split the section and return None."""
        for one in self._ranges:
            if one.start_key <= section.start and (not one.end_key or section.start < one.end_key):
                if not one.end_key or (section.end and section.end <= one.end_key):
                    return one
                self._put(section, *self._cut(section, one.end_key))
                return None
        raise AssertionError("the ranges do not hold every key")

    def _cut(self, section: Section, at: bytes) -> tuple[Section, Section]:
        left, right = replace(section, end=at), replace(section, start=at)
        if section.last_key >= at:
            return replace(left, stage=LOG, last_key=b""), right
        return left, replace(right, last_key=b"")

    def _put(self, old: Section, *new: Section) -> None:
        place = self.sections.index(old)
        self.sections[place : place + 1] = new

    def _took_rows(self, section: Section, answer: Any) -> Section:
        version, last = answer.current_snapshot_version, section.last_key
        self.renewed += version != section.version
        for row in answer.snapshot_data:
            assert row.key > last or not last, "rows come in the order of their keys, each once"
            assert row.key not in self.rows, f"{row.key!r} was told already"
            last = row.key
            self.rows[row.key], self.since[row.key] = json.loads(row.value), version
        stage = LOG if answer.end else SNAPSHOT
        return replace(section, version=version, stage=stage, last_key=b"" if answer.end else last)

    def _took_log(self, section: Section, answer: Any) -> Section:
        for change in answer.log_data:
            assert section.index < change.offset <= answer.current_log_index, "of this page, and never told before"
            going_on = self.open.pop(section.start, "")
            assert not going_on or going_on == change.txn_id, "a transaction is told to its end"
            if not change.txn_last:
                self.open[section.start] = change.txn_id
            if change.offset > self.since.get(change.key, 0):
                self._apply(change)
        assert section.index <= answer.current_log_index
        return replace(section, index=answer.current_log_index)

    def _apply(self, change: Any) -> None:
        self.changes += 1
        before = json.loads(change.before_value) if change.before_value else None
        assert before == self.rows.get(change.key), "the row was this before"
        if change.type:
            self.rows.pop(change.key, None)
        else:
            self.rows[change.key] = json.loads(change.value)
        self.since[change.key] = change.offset
