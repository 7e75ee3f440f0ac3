"""One side of a push as a process that can be lost: what a holder talks to.

python -m fakes.nixl_peer receive FILE NBYTES TLS
    registers the file's memory, prints the offer as JSON, and waits for ever
python -m fakes.nixl_peer send FILE NBYTES TLS OFFER PIECES COUNT
    writes COUNT of PIECES into the memory offered, prints "half", and then one more for each
    line that it is given
"""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.weights.holder.agent import Agent, AgentAhead, NixlError, load, nixl_version
from torchtitan_rl_ft.weights.holder.client import Offer
from torchtitan_rl_ft.weights.holder.mapping import Mapping, Mappings
from torchtitan_rl_ft.weights.holder.push import note_of
from torchtitan_rl_ft.weights.holder.receive import Landing

FAILED = 3  # exit code of a sender whose receiver does not take it


def main(argv: list[str]) -> None:
    role, path, nbytes, tls = argv[0], Path(argv[1]), int(argv[2]), argv[3]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    nixl = load(WeightsSection(ucx_tls=tls), path.parent)

    def say(text: str) -> None:
        print(text, file=answers, flush=True)

    if role == "receive":
        agents = AgentAhead(lambda: Agent(nixl, "receiver"), ThreadPoolExecutor(1))
        landing = Landing(agents, Mappings(), path, nbytes, [(0, nbytes)])
        say(json.dumps(landing.offer(nixl_version()).to_json()))
        landing.watch(lambda piece: None)
        return
    offer = Offer.from_json(json.loads(argv[4]))
    pieces, count = [tuple(p) for p in json.loads(argv[5])], int(argv[6])
    memory, agent = Mapping(path, nbytes), Agent(nixl, "sender")
    agent.register(memory.address, [(0, nbytes)])
    peer = agent.add_peer(offer.agent)

    def write(start: int, end: int) -> None:
        local, remote = memory.address + start, offer.address + start
        handle = agent.write(local, remote, end - start, peer, note_of((start, end)))
        while not agent.is_done(handle):
            time.sleep(0.0001)
        agent.release(handle)

    for piece in pieces[:count]:
        write(*piece)
    say("half")
    try:
        for piece in pieces[count:]:
            sys.stdin.readline()
            write(*piece)
    except NixlError as e:
        print(e, file=sys.stderr)
        os._exit(FAILED)
    time.sleep(3600)


if __name__ == "__main__":
    main(sys.argv[1:])
