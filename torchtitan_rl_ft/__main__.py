"""`python -m torchtitan_rl_ft` is the `torchtitan` command."""

import sys

from torchtitan_rl_ft.cli import main

if __name__ == "__main__":
    sys.exit(main())
