"""Child processes of `bench.grpc_stream`: readers of many streams, and a bare grpc.aio server as the floor.

`read ADDRESS STREAMS PATH REQUEST_HEX TOKEN`: opens the streams, says `open`, then for each number N on stdin waits
until every stream has N messages more, and says `done`.
`serve SIZE`: says its address; for each number N on stdin every open stream gets N messages of SIZE bytes.
"""

from __future__ import annotations

import asyncio
import sys

from grpc import aio


async def _numbers() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def read(address: str, streams: int, path: str, request: bytes, token: str) -> None:
    """Open all streams; for each number N on stdin wait for N more messages on every stream, then print `done`."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    # A channel each for ten streams: one connection would serialise them all.
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [aio.insecure_channel(address, options) for _ in range(-(-streams // 10))]
    calls = [channels[n // 10].unary_stream(path)(request, metadata=metadata) for n in range(streams)]
    for call in calls:
        await call.initial_metadata()
    print("open", flush=True)

    async def take(call: aio.UnaryStreamCall[bytes, bytes], count: int) -> None:
        for _ in range(count):
            assert await call.read() is not aio.EOF

    numbers = await _numbers()
    while line := await numbers.readline():
        await asyncio.gather(*(take(call, int(line)) for call in calls))
        print("done", flush=True)


async def serve(size: int) -> None:
    """Send prepared bytes, one message each: the cost of the gRPC library alone."""
    import grpc

    body, queues = b"x" * size, set[asyncio.Queue[int]]()

    async def stream(request: bytes, context: aio.ServicerContext[bytes, bytes]) -> None:
        mine: asyncio.Queue[int] = asyncio.Queue()
        queues.add(mine)
        await context.send_initial_metadata(())
        while True:
            for _ in range(await mine.get()):
                await context.write(body)

    class Handler(grpc.GenericRpcHandler):  # type: ignore[type-arg]
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
            return grpc.unary_stream_rpc_method_handler(stream)

    server = aio.server()
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    numbers = await _numbers()
    while line := await numbers.readline():
        for queue in queues:
            queue.put_nowait(int(line))


if __name__ == "__main__":
    import uvloop

    _, kind, *rest = sys.argv
    if kind == "serve":
        uvloop.run(serve(int(rest[0])))
    else:
        uvloop.run(read(rest[0], int(rest[1]), rest[2], bytes.fromhex(rest[3]), rest[4] if len(rest) > 4 else ""))
