"""The query instances that have subscribers; their ETags are kept canonical, also after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

import msgspec

from headwater.errors import Forbidden, HeadwaterError, NotFound, Unavailable
from headwater.feeds.deliver.hub import Run
from headwater.feeds.options import Options
from headwater.feeds.query_feeds.query_groups import InstanceGroups
from headwater.feeds.query_feeds.query_instances import Args, QueryInstance, QueryInstances
from headwater.feeds.subscription import Subscription
from headwater.feeds.subscriptions.registry import Registry, depends_on_query_reads, unknown
from headwater.feeds.subscriptions.store import InstancePosition
from headwater.model.principal import Principal
from headwater.model.work.usage import Usage

InstanceId = tuple[str, Hashable]  # a database, and the key of an instance


class WatchedInstances:
    """Counts the subscribers of each instance. Use it in the loop.

    A token names one subscriber: the id of a subscription, or a stream.
    """

    def __init__(self, instances: QueryInstances, registry: Registry, run: Run) -> None:
        self._instances, self._registry, self._run = instances, registry, run
        self._tokens: dict[Hashable, InstanceId] = {}
        self._counts: Usage[InstanceId] = Usage()
        self._durable: dict[InstanceId, Options] = {}  # the instances of stored subscriptions
        self._unopened: set[str] = set()  # databases that were unavailable when their instances were restored
        self._restoring = asyncio.get_running_loop().create_task(self._restore())

    async def _restore(self) -> None:
        """Watch the instances of the stored subscriptions; after a failure, the first reader of an instance adds it."""
        self._unopened = set()
        for subscription in self._registry.with_queries():
            if subscription.id not in self._tokens:
                try:
                    await self.add(subscription.id, subscription.options, await self.find(subscription.options))
                except Unavailable:
                    self._unopened.add(subscription.db)
                except HeadwaterError:
                    continue

    async def flush(self) -> None:
        """Save the positions of the watched instances."""
        if not self._restoring.done():
            return
        await self._run(lambda: self._registry.save_positions(self._positions(), but=self._unopened))
        if self._unopened:
            self._restoring = asyncio.get_running_loop().create_task(self._restore())

    async def close(self) -> None:
        """Stop restoring instances."""
        self._restoring.cancel()
        await asyncio.gather(self._restoring, return_exceptions=True)

    def groups(self, db: str) -> InstanceGroups:
        """Create the collection in which the hub of `db` keeps the readers of query instances."""
        return InstanceGroups(self._instances.routes(db), self.find)

    async def ask(self, who: Principal, query_id: str, args: Args) -> QueryInstance:
        """Return the instance for a new subscriber; raise an error if the query cannot run or `who` may not read it."""
        return await self._instances.find(None, query_id, args, who=who)

    async def find(self, options: Options) -> QueryInstance:
        """Return the instance that `options` name for the current schema, also if its tables were dropped."""
        return await self._instances.find(options.db, options.query_id, options.args or [], strict=False)

    async def add(self, token: Hashable, options: Options, instance: QueryInstance) -> None:
        """Watch `instance` for the subscriber `token`."""
        instance_id = (options.db, instance.key)
        if self._tokens.get(token) == instance_id:
            return
        self._tokens[token] = instance_id
        if isinstance(token, str) and instance_id not in self._durable:
            self._durable[instance_id] = options
        if self._counts.add(instance_id) == 1:
            saved = self._registry.position(options.db, instance_text(options))
            known = saved is not None and saved.prefix == instance.prefix
            last, since = (saved.last, saved.through) if known and saved is not None else (None, None)
            await self._run(lambda: self._instances.hold(options.db, instance, last=last, since=since))

    def remove(self, token: Hashable) -> None:
        """Watch no instance for `token` any more."""
        instance_id = self._tokens.pop(token, None)
        if instance_id is None:
            return
        self._counts.remove(instance_id)
        if not self._counts[instance_id]:
            self._durable.pop(instance_id, None)
            self._instances.release(*instance_id)

    def forget(self, db: str) -> None:
        """Forget the instances of a dropped database."""
        for token in [token for token, instance_id in self._tokens.items() if instance_id[0] == db]:
            instance_id = self._tokens.pop(token)
            self._counts.remove(instance_id)
            self._durable.pop(instance_id, None)

    def _positions(self) -> list[InstancePosition]:
        found = []
        for instance_id, options in list(self._durable.items()):
            position = self._instances.position(*instance_id)
            if position is not None:
                found.append(InstancePosition(instance_text(options), options.db, *position))
        return found


def instance_text(options: Options) -> str:
    """Return query id and arguments as JSON text, the key of the instance's position in the store."""
    return msgspec.json.encode([options.query_id, options.args or []]).decode()


async def allowed(subscription: Subscription, who: Principal, asking: Callable[[], WatchedInstances]) -> Subscription:
    """Return `subscription`; raise NotFound if its query reads data that `who` may not read."""
    if depends_on_query_reads(subscription, who):
        try:
            who.check_reads(subscription.db, await asking().find(subscription.options))
        except (Forbidden, NotFound):
            raise unknown(subscription.id) from None
    return subscription
