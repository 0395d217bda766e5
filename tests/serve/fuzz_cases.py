"""A fixed number of cases of a property, the same for the same number: servers do not allow shrinking."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings


def cases(examples: int, number: int) -> Callable[[Any], Any]:
    """Return a decorator for a property test, to stand above `given`: it runs `examples` cases chosen by `number`."""
    bounds = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: seed(number)(bounds(test))
