"""So many cases of a property, the same for the same number: for servers, which no example is shrunk against."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings


def cases(examples: int, number: int) -> Callable[[Any], Any]:
    """Before `given`."""
    bounds = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: seed(number)(bounds(test))
