"""The faces of a server, made ready to start."""

from __future__ import annotations

from headwater.config import ServeConfig
from headwater.serve.api import Api
from headwater.serve.auth.gate import Gate
from headwater.serve.gateway.kv import Kv
from headwater.serve.grpc.calls import Calls, Doorman
from headwater.serve.grpc.changefeed import ChangeFeedService
from headwater.serve.grpc.kv import KvService
from headwater.serve.grpc.pull import PullService
from headwater.serve.grpc.server import Face, GrpcServer
from headwater.serve.grpc.sochdb import SubscriptionService
from headwater.serve.grpc.stalled_calls import Stalls
from headwater.serve.limits.limits import Limits
from headwater.serve.metrics.metrics import Metrics
from headwater.serve.thread_bridge import Bridge


def open_faces(
    api: Api, gate: Gate, bridge: Bridge, limits: Limits, metrics: Metrics, config: ServeConfig
) -> GrpcServer:
    """Every face there is."""
    faces: list[Face] = [
        PullService(api, bridge),
        ChangeFeedService(api, bridge, metrics.changefeeds),
        SubscriptionService(api, bridge),
        KvService(Kv(api, bridge), bridge),
    ]
    most, streams = config.max_body_bytes, config.max_streams_per_client
    stalls = Stalls(config.stall_seconds)
    calls = Calls(gate, limits, metrics, api.databases, bridge, max_bytes=most, max_streams=streams, stalls=stalls)
    return GrpcServer(
        calls,
        Doorman(gate, limits),
        faces,
        limits,
        max_bytes=most,
        max_streams=streams,
        max_connections=config.max_connections,
    )
