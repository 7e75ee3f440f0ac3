"""`torchtitan run` with the real supervisor, lighthouse and trainers; rollout and serving are one
stand-in with a real ledger (run_host.py).

    python trainers_job.py [--section.key VALUE ...]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from torchtitan_rl_ft import cli
from torchtitan_rl_ft.config.sections import Sections
from torchtitan_rl_ft.roles import job
from torchtitan_rl_ft.roles.role_spec import RoleSpec
from torchtitan_rl_ft.run_folder import RunFolder

HOST = str(Path(__file__).with_name("run_host.py"))


def role_specs(sections: Sections, folder: RunFolder) -> list[RoleSpec]:
    host = (sys.executable, HOST, str(folder.path), "--steps", "100000", "--slow-s", "0.05")
    return [
        replace(spec, argv=host) if spec.name == "rollout" else spec
        for spec in real_specs(sections, folder)
        if spec.name != "serving"
    ]


if __name__ == "__main__":
    real_specs, job.role_specs = job.role_specs, role_specs
    sys.exit(cli.main(["run", "rl_ft_debug.toml", *sys.argv[1:]]))
