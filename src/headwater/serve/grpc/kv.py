"""sochdb.v1.KvService: keys and values, in the table `kv` of a namespace."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from headwater.serve.gateway.kv import Kv
from headwater.serve.grpc.calls import Answer, Caller, Pour
from headwater.serve.grpc.messages import message


class KvService:
    """What goes wrong is told by the status; the field `error` of the answers stays empty."""

    service = "sochdb.v1.KvService"

    def __init__(self, kv: Kv) -> None:
        self._kv = kv

    def methods(self) -> Mapping[str, Answer | Pour]:
        """See Face."""
        return {
            "Get": self._get,
            "Put": self._put,
            "Delete": self._delete,
            "Scan": self._scan,
            "BatchGet": self._batch_get,
            "BatchPut": self._batch_put,
        }

    async def _get(self, caller: Caller, asked: Any) -> Any:
        found = await self._kv.get(caller.who, asked.namespace, asked.key)
        return _made("KvGetResponse", value=found or b"", found=found is not None)

    async def _put(self, caller: Caller, asked: Any) -> Any:
        await self._kv.put(caller.who, asked.namespace, [asked])
        return _made("KvPutResponse", success=True)

    async def _delete(self, caller: Caller, asked: Any) -> Any:
        """`success` tells whether there was one."""
        return _made("KvDeleteResponse", success=await self._kv.delete(caller.who, asked.namespace, asked.key))

    async def _scan(self, caller: Caller, asked: Any) -> AsyncIterator[Any]:
        async for key, value in self._kv.scan(caller.who, asked.namespace, asked.prefix, asked.limit):
            yield _made("KvScanResponse", key=key, value=value)

    async def _batch_get(self, caller: Caller, asked: Any) -> Any:
        found = await self._kv.get_many(caller.who, asked.namespace, asked.keys)
        entries = [
            _made("KvEntry", key=key, value=value or b"", found=value is not None)
            for key, value in zip(asked.keys, found, strict=True)
        ]
        return _made("KvBatchGetResponse", entries=entries)

    async def _batch_put(self, caller: Caller, asked: Any) -> Any:
        """All of them or none."""
        count = await self._kv.put(caller.who, asked.namespace, asked.entries)
        return _made("KvBatchPutResponse", success_count=count)


def _made(name: str, **fields: Any) -> Any:
    return message(f"sochdb.v1.{name}")(**fields)
