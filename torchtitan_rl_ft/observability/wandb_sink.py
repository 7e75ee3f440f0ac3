"""Weights & Biases: one run for each history.

W&B takes no step twice, so a rewind begins another run of the same group, with what stands of the
history before it; a restart goes on in the run that there is. Offline, unless WANDB_MODE says
else; `wandb sync RUN/wandb/offline-run-*` uploads.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.observability.metric_sinks import History, titan_values


class WandbSink:
    """Raises wandb's errors, OSError."""

    name = "W&B"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        """`folder`: the run folder; `config`: what the run page shows of the configuration."""
        self._folder, self._config = folder, dict(config)
        self._run: Any = None
        self._rewinds = -1

    def begin(self, step: int, rewinds: int, history: History | None) -> None:
        if self._run is not None and rewinds == self._rewinds:
            return
        self.close()
        import wandb

        offline = "WANDB_MODE" not in os.environ
        run_id = f"{self._folder.name}-{_short_hash(self._folder)}"
        name = os.environ.get("WANDB_RUN_NAME", self._folder.name)
        again = f"-{rewinds}" if rewinds else ""
        self._run = wandb.init(
            entity=os.environ.get("WANDB_TEAM"),
            project=os.environ.get("WANDB_PROJECT", "torchtitan"),
            group=os.environ.get("WANDB_RUN_GROUP", self._folder.name),
            name=f"{name}{again}",
            id=os.environ.get("WANDB_RUN_ID", run_id) + again,
            resume=None if offline else "allow",
            mode="offline" if offline else None,
            dir=str(self._folder),
            config=self._config,
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_meta=True,
            ),
        )
        self._rewinds = rewinds
        for line in history() if history is not None else ():
            self.write(line["step"], titan_values(line))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """W&B writes by itself."""

    def close(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()


def _short_hash(folder: Path) -> str:
    return hashlib.sha256(str(folder).encode()).hexdigest()[:8]
