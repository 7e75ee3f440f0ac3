"""Runs the real serving role from sections given as JSON: {"rollout": {...}, "weights": {...},
"run": folder}."""

from __future__ import annotations

import json
import sys

from torchtitan_rl_ft.config.command_line import Override
from torchtitan_rl_ft.config.resolve import resolve_overrides
from torchtitan_rl_ft.roles.serving import main

if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    overrides = [
        Override("job.dump_folder", given["run"]),
        Override("model.hf_assets_path", given["model"]),
        *(Override(f"rollout.{key}", value) for key, value in given["rollout"].items()),
        *(Override(f"weights.{key}", value) for key, value in given.get("weights", {}).items()),
    ]
    sys.exit(main(resolve_overrides(overrides)))
