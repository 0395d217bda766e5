"""Connections of gRPC clients: accepted, counted and checked here, then passed on to the gRPC library."""
