"""`torchtitan run` of the debug job whose trainers obey orders (trainer_probe.py).

python probed_job.py [--section.key VALUE ...]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from torchtitan_rl_ft import cli
from torchtitan_rl_ft.config.sections import Sections
from torchtitan_rl_ft.roles import job, trainer
from torchtitan_rl_ft.roles.role_spec import RoleSpec
from torchtitan_rl_ft.run_folder import RunFolder

PROBE = str(Path(__file__).with_name("trainer_probe.py"))


def role_specs(sections: Sections, folder: RunFolder) -> list[RoleSpec]:
    """This script in the place of `python -m torchtitan_rl_ft`, as the trainers' launcher."""
    launcher = (sys.executable, str(Path(__file__).resolve()))
    return [
        replace(spec, argv=(*launcher, *spec.argv[3:])) if spec.name.startswith("trainer") else spec
        for spec in real_specs(sections, folder)
    ]


if __name__ == "__main__":
    if "--role" in sys.argv:
        trainer.RANK_COMMAND = (PROBE,)
        sys.exit(cli.main(sys.argv[1:]))
    real_specs, job.role_specs = job.role_specs, role_specs
    sys.exit(cli.main(["run", "rl_ft_debug.toml", *sys.argv[1:]]))
