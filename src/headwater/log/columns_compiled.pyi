"""What the compiled twin offers: see `columns`."""

from headwater.log.columns import Columns
from headwater.model.change import Change

FORM: int

def columns(changes: tuple[Change, ...]) -> Columns: ...
