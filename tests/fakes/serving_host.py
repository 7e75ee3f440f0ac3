"""Runs the real serving role from sections given as JSON: {"rollout": {...}, "run": folder}."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

from torchtitan_rl_ft.config.sections import JobSection, ModelSection, RolloutSection, Sections
from torchtitan_rl_ft.roles.serving import main

if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    sections = Sections(
        job=JobSection(dump_folder=given["run"]),
        model=ModelSection(hf_assets_path=given["model"]),
        rollout=RolloutSection(**given["rollout"]),
    )
    sys.exit(main(SimpleNamespace(sections=sections)))
