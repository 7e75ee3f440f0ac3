"""`python -m torchtitan_rl_ft.weights.holder SETTINGS`: one holder (see settings.py, launch.py)."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.run_folder import TOKEN_ENV
from torchtitan_rl_ft.weights.holder.agent import NixlError, NixlUnavailable
from torchtitan_rl_ft.weights.holder.directory import Replaced
from torchtitan_rl_ft.weights.holder.files import HolderRuns, MemoryRemoved, NotOwned
from torchtitan_rl_ft.weights.holder.process import serve
from torchtitan_rl_ft.weights.holder.receive import WornOut
from torchtitan_rl_ft.weights.holder.settings import HolderSettings


def main() -> int:
    """The exit code."""
    os.dup2(2, 1)  # UCX and NIXL write to stdout
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    try:
        settings = HolderSettings.from_json(sys.argv[1])
        token = os.environ[TOKEN_ENV]
    except (IndexError, ValueError, KeyError, TypeError) as e:
        print(f"torchtitan: error: holder: no settings: {e!r}", file=sys.stderr)
        return ExitCode.CONFIG
    try:
        asyncio.run(serve(settings, token))
    except NixlUnavailable as e:
        print(f"torchtitan: error: holder {settings.name}: {e}", file=sys.stderr)
        return ExitCode.CONFIG
    except (NixlError, HolderRuns, MemoryRemoved, NotOwned, Replaced, WornOut, OSError) as e:
        print(f"torchtitan: error: holder {settings.name}: {e}", file=sys.stderr)
        return ExitCode.FAILED
    return ExitCode.DONE


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # the library may end the process with a signal in its own clean-up
