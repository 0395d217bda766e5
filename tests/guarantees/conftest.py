"""The bad disk of tests/log and the captured databases of tests/capture serve here too."""

import sys
from pathlib import Path

for room in ("log", "capture"):
    sys.path.insert(0, str(Path(__file__).parent.parent / room))
