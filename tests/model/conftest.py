"""Property tests of this room try the same examples on every run, and a slow machine does not fail them."""

from hypothesis import settings

settings.register_profile("model", deadline=None, derandomize=True)
settings.load_profile("model")
