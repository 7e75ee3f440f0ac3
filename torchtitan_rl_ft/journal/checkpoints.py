"""Is a checkpoint still whole?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torchtitan_rl_ft.journal.protocol import CheckpointRef


def checker(run: Path) -> Callable[[CheckpointRef], str | None]:
    """Says why a checkpoint cannot be loaded, or None. Relative paths are in the run folder.

    torch.distributed.checkpoint writes `.metadata` last, so a folder with it was finished; a
    purged folder is gone.
    """

    def why_incomplete(checkpoint: CheckpointRef) -> str | None:
        folder = run / checkpoint.path
        if not folder.is_dir():
            return "the folder is gone"
        if not (folder / ".metadata").is_file():
            return "no .metadata: it was not finished"
        return None

    return why_incomplete
