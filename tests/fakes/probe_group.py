"""`torchtitan ...` with ranks that are probes (trainer_probe.py), under their real launcher."""

from __future__ import annotations

import sys
from pathlib import Path

from torchtitan_rl_ft import cli
from torchtitan_rl_ft.roles import trainer

trainer.RANK_COMMAND = (str(Path(__file__).parent / "trainer_probe.py"),)

if __name__ == "__main__":
    sys.exit(cli.main(sys.argv[1:]))
