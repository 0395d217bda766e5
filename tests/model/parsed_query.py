"""Queries of the JSON form, parsed without regard to their database."""

from __future__ import annotations

from typing import Any

from headwater.model.query.json_form import parse_query_of
from headwater.model.query.query import Query


def parse_query(body: Any, *, db: str | None = None) -> Query:
    """Return the query that the JSON `body` describes."""
    return parse_query_of(body, db=db)[0]
