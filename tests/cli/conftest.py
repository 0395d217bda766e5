"""The servers and certificates of tests/serve serve here too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "serve"))
