"""Metrics of a running pipeline for Prometheus: the values, and the endpoint that serves them."""
