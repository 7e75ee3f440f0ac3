"""`python -m torchtitan_rl_ft.weights.transports.nixl_check WEIGHTS`: does NIXL work here?

WEIGHTS is `[weights]` as JSON. Prints the version and ends with 0, or the reason and 1.
"""

from __future__ import annotations

import json
import os
import sys

from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.weights.holder.agent import (
    Agent,
    NixlError,
    NixlUnavailable,
    load,
    nixl_version,
)


def main() -> int:
    told = os.dup(1)
    os.dup2(2, 1)  # UCX and NIXL write to stdout
    weights = WeightsSection(**json.loads(sys.argv[1]))
    code, text = 0, ""
    try:
        agent = Agent(load(weights), "check")
        agent.drop()
        text = nixl_version()
    except (NixlUnavailable, NixlError) as e:
        code, text = 1, " ".join(str(e).split())
    os.write(told, f"{text}\n".encode())
    return code


if __name__ == "__main__":
    code = main()
    os._exit(code)  # the library may end the process with a signal in its own clean-up
