"""`torchtitan run` with a real supervisor and a real serving role; rollout and trainer are
stand-ins that wait. The job ends with the code in the file `end` of its run folder.

    python small_job.py [--section.key VALUE ...]
"""

from __future__ import annotations

import sys

from torchtitan_rl_ft import cli
from torchtitan_rl_ft.config.sections import Sections
from torchtitan_rl_ft.roles import job, session
from torchtitan_rl_ft.roles.lifecycle import Duty
from torchtitan_rl_ft.roles.role_spec import RoleSpec
from torchtitan_rl_ft.run_folder import RunFolder

WAIT = "while [ ! -e {end} ]; do sleep 0.05; done; exit $(cat {end})"


def role_specs(sections: Sections, folder: RunFolder) -> list[RoleSpec]:
    (serving,) = (s for s in real_specs(sections, folder) if s.name == "serving")
    wait = ("/bin/sh", "-c", WAIT.format(end=folder.path / "end"))
    groups = sections.fault_tolerance.replica_groups
    trainers = [RoleSpec(f"trainer-{g}", Duty.WORKER, wait) for g in range(groups)]
    return [serving, RoleSpec("rollout", Duty.DRIVER, wait), *trainers]


if __name__ == "__main__":
    real_specs, job.role_specs = job.role_specs, role_specs
    session.ATTACH_TIMEOUT_S = 2.0
    sys.exit(cli.main(["run", "rl_ft_debug.toml", *sys.argv[1:]]))
