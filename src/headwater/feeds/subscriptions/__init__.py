"""Durable subscriptions: creation, storage, positions."""
