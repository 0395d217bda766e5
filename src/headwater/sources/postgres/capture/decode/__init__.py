"""Decoding of pgoutput messages into changes."""
