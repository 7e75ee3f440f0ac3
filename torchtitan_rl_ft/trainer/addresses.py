"""Where the other roles of the run are, from the environment or the run folder."""

from __future__ import annotations

import os

from torchtitan_rl_ft.run_folder import LIGHTHOUSE_ENV, RUN_ENV, RunFolder


class RunNotUp(RuntimeError):
    """The trainer was started beside no living run."""


def find_run(dump_folder: str) -> RunFolder:
    """The run folder to join. Raises RunNotUp when it does not exist."""
    run = RunFolder(os.environ.get(RUN_ENV) or dump_folder)
    if not run.path.is_dir():
        raise RunNotUp(
            f"run folder {run.path} does not exist: start the job with `torchtitan run` first, or "
            f"name its folder in {RUN_ENV}"
        )
    return run


def role_url(run: RunFolder, name: str) -> str | None:
    """The address that role `name` registered last; None while it has none."""
    if url := os.environ.get(f"TORCHTITAN_RL_FT_{name.upper()}_URL"):
        return url
    address = run.role(name)
    return address.url if address is not None else None


def require_roles(run: RunFolder, names: tuple[str, ...]) -> None:
    """Raises RunNotUp that names the first role that is not up."""
    for name in names:
        if os.environ.get(f"TORCHTITAN_RL_FT_{name.upper()}_URL"):
            continue
        address = run.role(name)
        if address is None or not address.alive():
            state = "never came up" if address is None else f"(pid {address.pid}) is gone"
            raise RunNotUp(
                f"role {name} of the run in {run.path} {state}: start it with "
                f"`torchtitan run --role {name}`, or the whole job with `torchtitan run`"
            )


def set_lighthouse(run: RunFolder) -> None:
    """Point torchft at the run's lighthouse, unless the environment names one. Raises RunNotUp."""
    if os.environ.get(LIGHTHOUSE_ENV):
        return
    require_roles(run, ("lighthouse",))
    address = run.role("lighthouse")
    assert address is not None
    os.environ[LIGHTHOUSE_ENV] = address.url
