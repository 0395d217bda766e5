"""Interface of the compiled row decoder: see `row_plan`."""

from collections.abc import Callable

from headwater.model.change import Change
from headwater.sources.postgres.capture.decode.row_plan import Decode, Get, Plan

FORM: int

class Decoder:
    def __init__(self, plan: Plan) -> None: ...
    def __call__(self, message: bytes) -> Change: ...

class Frames:
    def __init__(self, refill: Callable[[], bytes]) -> None: ...
    def __call__(self, wait: int = ..., /) -> tuple[int, memoryview]: ...

def take(
    get: Get, rows: dict[bytes, Decode], changes: list[Change], most: int, most_bytes: int
) -> tuple[int, memoryview, int]: ...
