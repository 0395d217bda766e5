"""How many examples property tests try: `ci` the same few on every run, `soak` ten times as many, others each time.

`HYPOTHESIS_PROFILE=soak` chooses. The seed of the fresh ones follows from SOAK_SEED.
"""

import os
from typing import Any

from hypothesis import settings

TIMES = {"ci": 1, "soak": 10}
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")

settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("soak", deadline=None, max_examples=100 * TIMES["soak"], print_blob=True)


def examples(count: int, **more: Any) -> settings:
    """Return the settings of a test that tries `count` examples in `make test`."""
    return settings(max_examples=count * TIMES[PROFILE], **more)
