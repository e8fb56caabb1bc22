"""`python -m precache.ops.native`: compile the kernel where this precache lies."""

from __future__ import annotations

import sys

from precache.ops.native.build import BuildError, build

try:
    print(build())
except BuildError as error:
    sys.exit(str(error))
