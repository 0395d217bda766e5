"""The questions of the hub: what a batch means to all of them, by one look at each change, however many they are."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable

from headwater.errors import Forbidden, HeadwaterError
from headwater.feeds.formats.frame import Frame
from headwater.feeds.groups.group import Group
from headwater.feeds.groups.hub_batch import Batch, Found
from headwater.feeds.options import Options
from headwater.feeds.query_feeds.answer_confirmation import Confirming
from headwater.feeds.query_feeds.invalidation import Invalidations
from headwater.feeds.query_feeds.query_instances import Question, Routes
from headwater.feeds.query_feeds.query_view import QueryView
from headwater.feeds.query_feeds.relevant_changes import Gathering, Relevant, transaction_of
from headwater.model.change import Op

CONFIRMING = 4096  # instances whose answers are remembered
Find = Callable[[Options], Awaitable[Question]]
Frames = list[tuple[int, bytes]]
Steady = dict[Hashable, int]  # by instance: the offset from which on its answer is known to be the same


class _Open:
    """What one transaction means to one question, and to whom that goes."""

    def __init__(self, first: Relevant) -> None:
        self.found = Gathering(first)
        self.passes: set[Group] = set()
        self.ops: dict[Group, Op | None] = {}  # what each filter makes of the last change
        self._framed: dict[tuple[Invalidations, Frame, Op | None], bytes] = {}

    def frame(self, group: Group, view: QueryView) -> bytes:
        """Its frame for `group`, written once for all who see the same."""
        key = (view.invalidations, group.frame, self.ops.get(group))
        made = self._framed.get(key)
        if made is None:
            data = view.invalidations.write(view.question, self.found, key[2])
            made = self._framed[key] = group.frame(self.found.last.offset, "invalidate", data)
        return made


class QuestionGroups:
    """The groups of one database whose views are of queries. In the loop."""

    def __init__(self, routes: Routes, find: Find) -> None:
        self._routes, self._find = routes, find
        self._groups: dict[Hashable, dict[Group, QueryView]] = {}
        self._open: dict[Hashable, _Open] = {}  # transactions whose end was not published yet
        self._found: dict[Hashable, list[tuple[int, int]]] = {}  # of this batch: places in it, and of the query
        self._confirming: OrderedDict[Hashable, Confirming] = OrderedDict()
        self._all_outdated = False

    def __len__(self) -> int:
        return len(self._groups)

    # --- coming and going ------------------------------------------------------------------------------------

    def add(self, group: Group, view: QueryView) -> None:
        """Tell `group` what comes from now on."""
        key = view.question.key
        if key not in self._groups:
            self._groups[key] = {}
            self._routes.add(view.question)
        self._groups[key][group] = view

    def remove(self, group: Group) -> None:
        """Tell it no more."""
        if not isinstance(group.view, QueryView):
            return
        key = group.view.question.key
        groups = self._groups.get(key, {})
        groups.pop(group, None)
        if key in self._groups and not groups:
            del self._groups[key]
            self._open.pop(key, None)
            self._routes.remove(key)

    def confirming(self, key: Hashable) -> Confirming:
        """Where what is known of the answers of an instance is kept."""
        found = self._confirming.setdefault(key, Confirming())
        self._confirming.move_to_end(key)
        if len(self._confirming) > CONFIRMING:
            self._confirming.popitem(last=False)
        return found

    # --- the schema moves ------------------------------------------------------------------------------------

    def understood(self, question: Question) -> None:
        """From here on an instance is what `question` says."""
        groups = self._groups.get(question.key, {})
        if any(view.question.prefix != question.prefix for view in groups.values()):
            self._routes.add(question)
        for view in groups.values():
            view.understood(question)

    def begin_anew(self) -> None:
        """Continuity broke: what was open is void, and everything may mean something else."""
        self._open, self._found, self._all_outdated = {}, {}, True

    def outdate(self) -> None:
        """Everything may mean something else."""
        self._all_outdated = True

    async def refresh(self, schema: int) -> dict[Group, HeadwaterError]:
        """Understand anew what was understood before the change of the schema at `schema`; those that cannot be."""
        wanted: dict[Hashable, QueryView] = {}
        for key, groups in self._groups.items():
            view = next(iter(groups.values()))
            if self._all_outdated or view.question.head < schema:
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
        """Return the groups whose readers may not see what the question reads by now."""
        failed: dict[Group, HeadwaterError] = {}
        for group, view in self._groups.get(key, {}).items():
            try:
                view.check_scope()
            except Forbidden as error:
                failed[group] = error
        return failed

    async def _refreshed(self, view: QueryView) -> HeadwaterError | None:
        try:
            self.understood(await self._find(view.options))
        except HeadwaterError as error:
            return error
        return None

    # --- one batch -------------------------------------------------------------------------------------------

    def route(self, batch: Batch) -> dict[Group, list[int]]:
        """For each group the places in `batch` that matter to its question, ascending."""
        found: dict[Hashable, list[tuple[int, int]]] = {}
        self._found = found
        for at, change in enumerate(batch.changes):
            for key, place in self._routes.route(change):
                found.setdefault(key, []).append((at, place))
        return {group: [at for at, _ in places] for key, places in found.items() for group in self._groups.get(key, ())}

    def guarded(self) -> dict[Hashable, Question]:
        """Of the questions that something in this batch matters to, those whose answer may be the same all the same."""
        found: dict[Hashable, Question] = {}
        for key in {**self._open, **self._found}:
            for view in self._groups.get(key, {}).values():
                if view.question.is_guarded:
                    found[key] = view.question
                break  # they all ask the same
        return found

    def frames(self, batch: Batch, decided: dict[Group, Found], steady: Steady) -> dict[Group, Frames]:
        """What the transactions that end in `batch` mean to each group. `decided` is what passes its filter, `steady`
        which of them mean nothing: what left the answer as it was did so for whoever holds it."""
        made: dict[Group, Frames] = {}
        passing = {group: dict(found) for group, found in decided.items()}
        for key in {**self._open, **self._found}:
            groups = self._groups.get(key, {})
            for done in self._ended(key, batch, groups, passing):
                if key in steady and steady[key] < done.found.transaction:
                    continue
                offset = done.found.last.offset
                for group, view in groups.items():
                    if group in done.passes and offset > group.since:
                        made.setdefault(group, []).append((offset, done.frame(group, view)))
        self._found = {}
        return made

    def _ended(
        self, key: Hashable, batch: Batch, groups: dict[Group, QueryView], passing: dict[Group, dict[int, Op]]
    ) -> list[_Open]:
        current, done = self._open.pop(key, None), []
        for at, place in self._found.get(key, ()):
            part, offset, change = batch.placed[at]
            one = Relevant(part, offset, change, place)
            if current is not None and current.found.transaction == transaction_of(part):
                current.found.take(one)
            else:
                done += [] if current is None else [current]
                current = _Open(one)
            for group in groups:
                op = current.ops[group] = passing.get(group, {}).get(at)
                if op is not None:
                    current.passes.add(group)
        if current is not None and current.found.transaction == batch.unfinished:
            self._open[key] = current
        elif current is not None:
            done.append(current)
        return done


def steady_at(questions: dict[Hashable, Question], upto: int) -> Steady:
    """In a thread: from where on the answers of `questions` are known to be the same until `upto`."""
    found: Steady = {}
    with contextlib.suppress(HeadwaterError):  # who knows nothing tells everything
        for key, question in questions.items():
            if (offset := question.steady(upto)) is not None:
                found[key] = offset
    return found
