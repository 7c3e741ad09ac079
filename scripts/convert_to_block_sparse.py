"""Make a model's matrices block-sparse: `clocher sparsify` under its older name."""

import sys

from clocher_runtime.subcommands.sparsify import main

if __name__ == "__main__":
    sys.exit(main())
