"""Limits on requests, connections, streams and tenants."""
