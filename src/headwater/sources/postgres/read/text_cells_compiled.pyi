"""Interface of the cells of an answer as columns: see `text_cells`."""

FORM: int

def columns(
    result: int, rows: int, width: int, get_value: int, get_length: int, get_is_null: int
) -> tuple[list[tuple[bytearray | None, bytearray, bytearray]], int, int]: ...
