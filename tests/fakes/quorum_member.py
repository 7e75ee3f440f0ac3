"""A replica group as the lighthouse sees it: torchft's own manager server, no training.

    python quorum_member.py REPLICA_ID LIGHTHOUSE_URL

Each line of its input is a step number: it asks for a quorum as a group of that step would, and
answers with a line of JSON: {"members": [...], "quorum_id": n, "heal": bool}, or {"error": text}.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

from torchtitan_rl_ft.roles.lighthouse import load_extension

ASK_TIMEOUT_S = 30


def main() -> None:
    replica_id, lighthouse = sys.argv[1:]
    torchft = load_extension()
    limit = timedelta(seconds=ASK_TIMEOUT_S)
    server = torchft.ManagerServer(
        replica_id=replica_id,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        bind="127.0.0.1:0",
        store_addr="127.0.0.1:1",
        world_size=1,
        heartbeat_interval=timedelta(milliseconds=100),
        connect_timeout=limit,
        quorum_retries=0,
    )
    client = torchft.ManagerClient(server.address(), connect_timeout=limit)
    print(json.dumps({"up": replica_id}), flush=True)
    for line in sys.stdin:
        try:
            found = client._quorum(
                group_rank=0,
                step=int(line),
                checkpoint_metadata="",
                shrink_only=False,
                init_sync=False,
                commit_failures=0,
                timeout=limit,
            )
            answer = {
                "members": found.replica_ids,
                "quorum_id": found.quorum_id,
                "heal": found.heal,
            }
        except (RuntimeError, TimeoutError) as e:
            answer = {"error": str(e)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
