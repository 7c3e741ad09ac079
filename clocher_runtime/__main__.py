"""`python -m clocher_runtime` is `clocher`."""

import sys

from clocher_runtime.cli import clocher

sys.exit(clocher())
