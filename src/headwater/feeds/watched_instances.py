"""Watching: which instances are subscribed. As long as one is, its tag is canonical, also after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

import msgspec

from headwater.errors import HeadwaterError, Unavailable
from headwater.feeds.deliver.hub import Run
from headwater.feeds.options import Options
from headwater.feeds.query_feeds.query_groups import QuestionGroups
from headwater.feeds.query_feeds.query_instances import Args, Question, Questions
from headwater.feeds.subscription import Subscription
from headwater.feeds.subscriptions.registry import Registry
from headwater.feeds.subscriptions.store import Stand
from headwater.model.principal import Principal

Held = tuple[str, Hashable]  # a database, and the key of an instance


class Watching:
    """In the loop. A token is whoever wants an instance watched: a subscription by its id, or a stream."""

    def __init__(self, questions: Questions, registry: Registry, run: Run) -> None:
        self._questions, self._registry, self._run = questions, registry, run
        self._tokens: dict[Hashable, Held] = {}
        self._counts: dict[Held, int] = {}
        self._durable: dict[Held, Options] = {}  # those of stored subscriptions
        self._unopened: set[str] = set()  # databases that were not there to be asked
        self._restoring = asyncio.get_running_loop().create_task(self._restore())

    async def _restore(self) -> None:
        """Take up what the stored subscriptions want watched. What cannot be asked now waits for its first reader."""
        self._unopened = set()
        for held in self._registry.with_queries():
            if held.id not in self._tokens:
                try:
                    await self.add(held.id, held.options, await self.find(held.options))
                except Unavailable:
                    self._unopened.add(held.db)
                except HeadwaterError:
                    continue

    async def flush(self) -> None:
        """Keep how far the subscribed instances were looked at."""
        if not self._restoring.done():
            return
        await self._run(lambda: self._registry.keep_stands(self._stands(), but=self._unopened))
        if self._unopened:
            self._restoring = asyncio.get_running_loop().create_task(self._restore())

    async def close(self) -> None:
        """Nothing is taken up any more."""
        self._restoring.cancel()
        await asyncio.gather(self._restoring, return_exceptions=True)

    def groups(self, db: str) -> QuestionGroups:
        """For the hub of a database."""
        return QuestionGroups(self._questions.routes(db), self.find)

    async def ask(self, who: Principal, query_id: str, args: Args) -> Question:
        """A question of somebody who has not asked it before; refused where it cannot be asked, or not by them."""
        return await self._questions.find(None, query_id, args, who=who)

    async def find(self, options: Options) -> Question:
        """The question that `options` name, as it is understood now, whatever became of its tables."""
        return await self._questions.find(options.db, options.query_id, options.args or [], strict=False)

    async def add(self, token: Hashable, options: Options, question: Question) -> None:
        """`token` wants it watched."""
        held = (options.db, question.key)
        if self._tokens.get(token) == held:
            return
        self._tokens[token] = held
        self._counts[held] = self._counts.get(held, 0) + 1
        if isinstance(token, str) and held not in self._durable:
            self._durable[held] = options
        if self._counts[held] == 1:
            stand = self._registry.stand(options.db, instance_text(options))
            known = stand is not None and stand.prefix == question.prefix
            last, since = (stand.last, stand.through) if known and stand is not None else (None, None)
            await self._run(lambda: self._questions.hold(options.db, question, last=last, since=since))

    def remove(self, token: Hashable) -> None:
        """It does not any more."""
        held = self._tokens.pop(token, None)
        if held is None:
            return
        self._counts[held] -= 1
        if not self._counts[held]:
            del self._counts[held]
            self._durable.pop(held, None)
            self._questions.release(*held)

    def forget(self, db: str) -> None:
        """A database is no more."""
        for token in [token for token, held in self._tokens.items() if held[0] == db]:
            held = self._tokens.pop(token)
            self._counts.pop(held, None)
            self._durable.pop(held, None)

    def _stands(self) -> list[Stand]:
        found = []
        for held, options in list(self._durable.items()):
            position = self._questions.position(*held)
            if position is not None:
                found.append(Stand(instance_text(options), options.db, *position))
        return found


def instance_text(options: Options) -> str:
    """An instance as one text."""
    return msgspec.json.encode([options.query_id, options.args or []]).decode()


async def allowed(held: Subscription, who: Principal, asking: Callable[[], Watching]) -> Subscription:
    """`held`; Forbidden where it is on a query that reads what is none of the caller's business."""
    if held.options.query_id and who.tables(held.db) is not None:
        who.check_reads(held.db, await asking().find(held.options))
    return held
