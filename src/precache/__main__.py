"""``python -m precache`` is the command line."""

import sys

from precache.cli.main import main

sys.exit(main())
