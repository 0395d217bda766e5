"""`python -m headwater` is the command `headwater`."""

import sys

from headwater.cli.main import main

sys.exit(main())
