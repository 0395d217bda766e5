"""What the compiled twin offers: see `columns`."""

from headwater.log.disk.block_columns import Columns
from headwater.model.change import Change

FORM: int

def columns(changes: tuple[Change, ...]) -> Columns: ...
