"""Types of the compiled Debezium encoder; `envelope` has the plan that it uses."""

from collections.abc import Callable

from headwater.feeds.formats.envelope import Plan as Given
from headwater.feeds.formats.frame import FrameTemplate
from headwater.model.change import Change, Op, Transaction
from headwater.model.table import Table

FORM: int

class Plan:
    def __init__(self, plan: Given) -> None: ...
    def change(self, part: Transaction, offset: int, change: Change, op: Op) -> bytes: ...

class Frames:
    @property
    def count(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def last(self) -> int: ...
    def __init__(
        self,
        find: Callable[[Table], Plan] | None,
        careful: Callable[[Transaction, int, Change, Op], bytes] | None,
        enclosing: FrameTemplate | None,
        limit: int,
        most: int,
    ) -> None: ...
    @property
    def is_full(self) -> bool: ...
    def take(self, part: Transaction, ops: list[Op | None]) -> int: ...
    def data(self) -> bytes: ...
