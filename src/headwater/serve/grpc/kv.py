"""sochdb.v1.KvService: keys and values, in the table `kv` of a namespace."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from headwater.serve.gateway.kv import Kv
from headwater.serve.grpc.calls import Answer, Caller, Pour, Service
from headwater.serve.grpc.messages import LARGE, sochdb_v1
from headwater.serve.thread_bridge import Bridge


class KvService(Service):
    """The key-value service. Errors are reported by the status; the field `error` of the answers stays empty."""

    service = "sochdb.v1.KvService"

    def __init__(self, kv: Kv, bridge: Bridge) -> None:
        self._kv, self._bridge = kv, bridge

    def methods(self) -> Mapping[str, Answer | Pour]:
        return {
            "Get": self._get,
            "Put": self._put,
            "Delete": self._delete,
            "Scan": self._scan,
            "BatchGet": self._batch_get,
            "BatchPut": self._batch_put,
        }

    async def _get(self, caller: Caller, request: Any) -> Any:
        found = await self._kv.get(caller.who, request.namespace, request.key)
        value = found or b""
        return await self._encoded(len(value), lambda: sochdb_v1("KvGetResponse", value=value, found=found is not None))

    async def _put(self, caller: Caller, request: Any) -> Any:
        await self._kv.put(caller.who, request.namespace, [request])
        return sochdb_v1("KvPutResponse", success=True)

    async def _delete(self, caller: Caller, request: Any) -> Any:
        """Delete a key; `success` is whether it existed."""
        return sochdb_v1("KvDeleteResponse", success=await self._kv.delete(caller.who, request.namespace, request.key))

    async def _scan(self, caller: Caller, request: Any) -> AsyncIterator[bytes]:
        pairs = self._kv.scan(caller.who, request.namespace, request.prefix, request.limit, caller.hold)
        async for key, value in pairs:
            made = functools.partial(sochdb_v1, "KvScanResponse", key=key, value=value)
            yield await self._encoded(len(key) + len(value), made)

    async def _batch_get(self, caller: Caller, request: Any) -> Any:
        found = await self._kv.get_many(caller.who, request.namespace, request.keys)
        pairs = list(zip(request.keys, found, strict=True))

        def made() -> Any:
            entries = [
                sochdb_v1("KvEntry", key=key, value=value or b"", found=value is not None) for key, value in pairs
            ]
            return sochdb_v1("KvBatchGetResponse", entries=entries)

        return await self._encoded(sum(len(key) + len(value or b"") for key, value in pairs), made)

    async def _batch_put(self, caller: Caller, request: Any) -> Any:
        """Put all entries or none."""
        count = await self._kv.put(caller.who, request.namespace, request.entries)
        return sochdb_v1("KvBatchPutResponse", success_count=count)

    async def _encoded(self, size: int, made: Callable[[], Any]) -> bytes:
        """Return the message from `made`, encoded; a large one in a thread."""
        if size <= LARGE:
            return _bytes(made)
        return await self._bridge.call(_bytes, made)


def _bytes(made: Callable[[], Any]) -> bytes:
    return bytes(made().SerializeToString())
