"""Feeds: from the log to subscribers; subscriptions, filters, formats, backpressure, checkpoints and the hub."""
