"""Delivery: streams and polls, from the log and the hub to their readers."""
