"""`torchtitan run` with the real supervisor, lighthouse and trainers; rollout and serving are one
stand-in with a real ledger (run_host.py).

    python trainers_job.py [--probed] [--section.key VALUE ...]

With `--probed` the ranks obey orders (probed_job.py), under their real launchers. Policies are
folders: no relay asks for what sources hold, and no serving role looks after their memory when the
job is killed.
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

HERE = Path(__file__).resolve().parent
PROBED = "--probed"


def role_specs(sections: Sections, folder: RunFolder) -> list[RoleSpec]:
    host = (sys.executable, str(HERE / "run_host.py"), str(folder.path))
    host = (*host, "--steps", "100000", "--slow-s", "0.05")
    specs = []
    for spec in real_specs(sections, folder):
        if spec.name == "rollout":
            spec = replace(spec, argv=host)
        elif spec.name.startswith("trainer-") and PROBED in sys.argv:
            spec = replace(spec, argv=(sys.executable, str(HERE / "probed_job.py"), *spec.argv[3:]))
        if spec.name != "serving":
            specs.append(spec)
    return specs


if __name__ == "__main__":
    real_specs, job.role_specs = job.role_specs, role_specs
    given = [a for a in sys.argv[1:] if a != PROBED]
    sys.exit(cli.main(["run", "rl_ft_debug.toml", "--rollout.weight_transport", "disk", *given]))
