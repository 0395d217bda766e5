"""Formats: a change, or a row of a snapshot, as the bytes of one JSON object, in the envelope its reader likes."""
