"""The network interfaces: HTTP, RPC, gRPC and the gateway; they convert requests and results, and decide nothing."""
