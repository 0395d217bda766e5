"""The hub's groups of query instances: each change of a batch is routed once, however many instances there are."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Hashable

from headwater.errors import Forbidden, HeadwaterError
from headwater.feeds.formats.frame import Frame
from headwater.feeds.groups.group import Group
from headwater.feeds.groups.hub_batch import Batch, Found
from headwater.feeds.options import Options
from headwater.feeds.query_feeds.answer_confirmation import AnswerConfirmation
from headwater.feeds.query_feeds.invalidation import Invalidations
from headwater.feeds.query_feeds.query_instances import QueryInstance, Routes
from headwater.feeds.query_feeds.query_view import QueryView
from headwater.feeds.query_feeds.relevant_changes import RelevantChange, RelevantChanges, transaction_of
from headwater.model.change import Change, Op

CONFIRMATIONS = 4096  # instances whose last result is remembered
Find = Callable[[Options], Awaitable[QueryInstance]]
Frames = list[tuple[int, bytes]]
Allowed = frozenset[str] | None  # the tables that the readers of a group may see; None: all tables
Steady = dict[Hashable, int]  # by instance: the offset since which its result is known to be unchanged


class _OpenTransaction:
    """The relevant changes of one transaction for one instance, and the groups whose filter they pass."""

    def __init__(self, first: RelevantChange) -> None:
        self.found = RelevantChanges(first)
        self.passes: set[Group] = set()
        self.ops: dict[Group, Op | None] = {}  # the op that each filter delivers the last change as
        self._framed: dict[tuple[Invalidations, Frame, Op | None], bytes] = {}

    def frame(self, group: Group, view: QueryView) -> bytes:
        """Return the frame for `group`, encoded once for all groups with the same format."""
        key = (view.invalidations, group.frame, self.ops.get(group))
        made = self._framed.get(key)
        if made is None:
            data = view.invalidations.write(view.instance, self.found, key[2])
            made = self._framed[key] = group.frame(self.found.last.offset, "invalidate", data)
        return made


class InstanceGroups:
    """The groups of one database whose views are of queries. Use it in the loop."""

    def __init__(self, routes: Routes, find: Find) -> None:
        self._routes, self._find = routes, find
        self._groups: dict[Hashable, dict[Group, QueryView]] = {}
        # Transactions whose end is not published yet, by instance and scope: some readers see only a part of them.
        self._open: dict[Hashable, dict[Allowed, _OpenTransaction]] = {}
        self._found: dict[Hashable, list[tuple[int, int]]] = {}  # positions in this batch and dependency numbers
        # Returns the confirmation of the instance with this key, which all its views share.
        self.confirmation_of: Callable[[Hashable], AnswerConfirmation] = functools.lru_cache(CONFIRMATIONS)(
            lambda key: AnswerConfirmation()
        )
        self._all_outdated = False

    def __len__(self) -> int:
        return len(self._groups)

    # --- membership ------------------------------------------------------------------------------------------

    def add(self, group: Group, view: QueryView) -> None:
        """Publish invalidations to `group` from now on."""
        key = view.instance.key
        if key not in self._groups:
            self._groups[key] = {}
            self._routes.add(view.instance)
        self._groups[key][group] = view

    def remove(self, group: Group) -> None:
        """Publish nothing to `group` any more."""
        if not isinstance(group.view, QueryView):
            return
        key = group.view.instance.key
        groups = self._groups.get(key, {})
        groups.pop(group, None)
        if key in self._groups and not groups:
            del self._groups[key]
            self._open.pop(key, None)
            self._routes.remove(key)

    # --- schema changes --------------------------------------------------------------------------------------

    def set_instance(self, instance: QueryInstance) -> None:
        """Use the newly analysed `instance` for all groups of its key."""
        groups = self._groups.get(instance.key, {})
        if any(view.instance.prefix != instance.prefix for view in groups.values()):
            self._routes.add(instance)
        for view in groups.values():
            view.set_instance(instance)

    def reset(self) -> None:
        """Drop unfinished transactions after a loss of continuity, and analyse every query again."""
        self._open, self._found, self._all_outdated = {}, {}, True

    def outdate(self) -> None:
        """Analyse every query again before the next batch."""
        self._all_outdated = True

    async def refresh(self, schema: int) -> dict[Group, HeadwaterError]:
        """Analyse again the queries that were analysed before the schema change at `schema`; return the failed groups
        with their errors."""
        wanted: dict[Hashable, QueryView] = {}
        for key, groups in self._groups.items():
            view = next(iter(groups.values()))
            if self._all_outdated or view.instance.head < schema:
                wanted[key] = view
        self._all_outdated = False
        found = await asyncio.gather(*(self._refreshed(view) for view in wanted.values()))
        failed: dict[Group, HeadwaterError] = {}
        for key, error in zip(wanted, found, strict=True):
            if error is not None:
                failed |= dict.fromkeys(self._groups.get(key, ()), error)
            else:
                failed |= self._out_of_scope(key)
        return failed

    def _out_of_scope(self, key: Hashable) -> dict[Group, HeadwaterError]:
        """Return the groups whose readers may not see every table that the instance now reads."""
        failed: dict[Group, HeadwaterError] = {}
        for group, view in self._groups.get(key, {}).items():
            try:
                view.check_scope()
            except Forbidden as error:
                failed[group] = error
        return failed

    async def _refreshed(self, view: QueryView) -> HeadwaterError | None:
        try:
            self.set_instance(await self._find(view.options))
        except HeadwaterError as error:
            return error
        return None

    # --- one batch -------------------------------------------------------------------------------------------

    def route(self, batch: Batch) -> dict[Group, list[int]]:
        """Return for each group the positions in `batch` of the changes that are relevant to its instance, in order."""
        found: dict[Hashable, list[tuple[int, int]]] = {}
        self._found = found
        for at, change in enumerate(batch.changes):
            for key, dependency in self._routes.route(change):
                found.setdefault(key, []).append((at, dependency))
        seen: dict[Group, list[int]] = {}
        for key, pairs in found.items():
            for group, view in self._groups.get(key, {}).items():
                if visible := [at for at, _ in pairs if view.sees(batch.changes[at])]:
                    seen[group] = visible
        return seen

    def count(self, change: Change) -> int:
        """Return the number of groups to whose instance `change` is relevant."""
        return sum([len(self._groups.get(key, ())) for key, _ in self._routes.route(change)])

    def guarded(self) -> dict[Hashable, QueryInstance]:
        """Return the instances with relevant changes in this batch whose result may nevertheless be unchanged."""
        found: dict[Hashable, QueryInstance] = {}
        for key in {**self._open, **self._found}:
            for view in self._groups.get(key, {}).values():
                if view.instance.is_guarded:
                    found[key] = view.instance
                break  # all views of one key have the same instance
        return found

    def frames(self, batch: Batch, decided: dict[Group, Found], steady: Steady) -> dict[Group, Frames]:
        """Return the invalidations of the transactions that end in `batch` for each group.

        `decided` holds the changes that pass the filter of each group. A transaction after the offset in `steady` is
        skipped: it left the result unchanged for every client.
        """
        made: dict[Group, Frames] = {}
        passing = {group: dict(found) for group, found in decided.items()}
        for key in {**self._open, **self._found}:
            opened = self._open.pop(key, {})
            for allowed, groups in _by_scope(self._groups.get(key, {})).items():
                for done in self._ended(key, batch, groups, passing, opened.get(allowed)):
                    if key in steady and steady[key] < done.found.transaction:
                        continue
                    offset = done.found.last.offset
                    for group, view in groups.items():
                        if group in done.passes and offset > group.since:
                            made.setdefault(group, []).append((offset, done.frame(group, view)))
        self._found = {}
        return made

    def _ended(
        self,
        key: Hashable,
        batch: Batch,
        groups: dict[Group, QueryView],
        passing: dict[Group, dict[int, Op]],
        current: _OpenTransaction | None,
    ) -> list[_OpenTransaction]:
        """Return the transactions that ended, for groups whose readers may see the same tables."""
        done = []
        view = next(iter(groups.values()))
        for at, dependency in self._found.get(key, ()):
            part, offset, change = batch.placed[at]
            if not view.sees(change):
                continue
            one = RelevantChange(part, offset, change, dependency)
            if current is not None and current.found.transaction == transaction_of(part):
                current.found.take(one)
            else:
                done += [] if current is None else [current]
                current = _OpenTransaction(one)
            for group in groups:
                op = current.ops[group] = passing.get(group, {}).get(at)
                if op is not None:
                    current.passes.add(group)
        if current is not None and current.found.transaction == batch.unfinished:
            self._open.setdefault(key, {})[view.allowed_tables] = current
        elif current is not None:
            done.append(current)
        return done


def _by_scope(groups: dict[Group, QueryView]) -> dict[Allowed, dict[Group, QueryView]]:
    """Return the groups by the tables that their readers may see."""
    found: dict[Allowed, dict[Group, QueryView]] = {}
    for group, view in groups.items():
        found.setdefault(view.allowed_tables, {})[group] = view
    return found


def steady_at(instances: dict[Hashable, QueryInstance], upto: int) -> Steady:
    """Return since which offset each result is known to be unchanged until `upto`. Blocks: call it in a thread."""
    found: Steady = {}
    with contextlib.suppress(HeadwaterError):  # without this knowledge every invalidation is delivered
        for key, instance in instances.items():
            if (offset := instance.steady(upto)) is not None:
                found[key] = offset
    return found
