"""The gRPC services of a server, ready to start."""

from __future__ import annotations

from headwater.config import ServeConfig
from headwater.serve.api import Api
from headwater.serve.auth.gate import Gate
from headwater.serve.gateway.kv import Kv
from headwater.serve.grpc.calls import AuthInterceptor, Calls, Service
from headwater.serve.grpc.changefeed import ChangeFeedService
from headwater.serve.grpc.kv import KvService
from headwater.serve.grpc.pull import PullService
from headwater.serve.grpc.server import GrpcServer
from headwater.serve.grpc.sochdb import SubscriptionService
from headwater.serve.grpc.stalled_calls import UnreadAnswers
from headwater.serve.limits.connection_limits import ConnectionLimits
from headwater.serve.limits.limits import Limits
from headwater.serve.metrics.metrics import Metrics
from headwater.serve.thread_bridge import Bridge


def open_services(
    api: Api,
    gate: Gate,
    bridge: Bridge,
    limits: Limits,
    metrics: Metrics,
    config: ServeConfig,
    connections: ConnectionLimits,
) -> GrpcServer:
    """Create the gRPC server with all services."""
    services: list[Service] = [
        PullService(api, bridge),
        ChangeFeedService(api, bridge, metrics.changefeeds),
        SubscriptionService(api, bridge),
        KvService(Kv(api, bridge), bridge),
    ]
    unread = UnreadAnswers(config.stall_seconds)
    calls = Calls(gate, limits, metrics, api.databases, bridge, config, unread)
    auth = AuthInterceptor(gate, limits, unread)
    return GrpcServer(calls, auth, services, limits, config, connections, unread)
