"""One trainer rank: TorchTitan's own entry point on the config of the run.

    RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=... MASTER_PORT=... \
        python -m torchtitan_rl_ft.trainer.entry

Same as `torchrun ... -m torchtitan.train --module torchtitan_rl_ft --config from_run`, with the
CPU platform set up before TorchTitan is imported and errors of the set-up told in one line.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable

from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.run_folder import RUN_ENV, RunFolder
from torchtitan_rl_ft.trainer import watch


def main() -> int:
    watch.begin_early()
    # Imports make no garbage, and the collector takes a quarter of their time looking for it.
    gc.disable()
    from torchtitan_rl_ft.platform import torchtitan_cpu

    torchtitan_cpu.install()
    import torchtitan.train

    from torchtitan_rl_ft.journal.checkpoints import CheckpointUnusable
    from torchtitan_rl_ft.replica.group import MinimumMismatch, NoQuorum
    from torchtitan_rl_ft.trainer import rl_trainer, standby  # noqa: F401  TorchTitan's, early
    from torchtitan_rl_ft.trainer.addresses import RunNotUp
    from torchtitan_rl_ft.trainer.checkpoint_folder import FoldersDiffer
    from torchtitan_rl_ft.trainer.model_spec import ModelConfigError
    from torchtitan_rl_ft.trainer.rerun import WrongResult
    from torchtitan_rl_ft.trainer.stepper import NumericStop
    from torchtitan_rl_ft.weights.shards import ShardsUnclear

    # Its line for each of a trainer's many requests would hide everything else.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    gc.freeze()
    gc.enable()
    sys.argv = [sys.argv[0], "--module", "torchtitan_rl_ft", "--config", "from_run", *sys.argv[1:]]
    try:
        standby.await_place(standby.IMPORTED)
        _train(torchtitan.train.main)
    except (RunNotUp, ModelConfigError, FileNotFoundError) as e:
        print(f"torchtitan: trainer cannot start: {e}", file=sys.stderr)
        return ExitCode.CONFIG if isinstance(e, ModelConfigError) else ExitCode.FAILED
    except (CheckpointUnusable, FoldersDiffer, MinimumMismatch, ShardsUnclear) as e:
        print(f"torchtitan: error: {e}", file=sys.stderr)
        return ExitCode.CONFIG
    except NoQuorum as e:
        print(f"torchtitan: error: {e}", file=sys.stderr)
        return ExitCode.FAILED
    except NumericStop as e:
        print(f"torchtitan: numeric stop: {e}", file=sys.stderr)
        return ExitCode.NUMERIC
    except WrongResult as e:
        print(f"torchtitan: wrong results: {e}", file=sys.stderr)
        return ExitCode.WRONG_RESULT
    return ExitCode.DONE


def _train(train: Callable[[], None]) -> None:
    """Once, or again and again inside this process (`recovery.inprocess_restart`)."""
    from torchtitan_rl_ft.trainer import standby

    if RUN_ENV in os.environ:
        run = RunFolder(os.environ[RUN_ENV])
        recovery = Resolved.read(run.path).sections.recovery
        # The launcher of a standby of several ranks does not know what its group has become.
        waiting_group = standby.waits() and os.environ.get("WORLD_SIZE", "1") != "1"
        if recovery.inprocess_restart and not waiting_group:
            from torchtitan_rl_ft.trainer import inprocess

            inprocess.of_this_rank(train, run, recovery).run()
            return
    train()


if __name__ == "__main__":
    sys.exit(main())
