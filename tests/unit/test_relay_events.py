"""What the events of relays make of a run that is looked at: a process beside others, no place of
work, and no outage of the job."""

from __future__ import annotations

import json

from run_events import Log

from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.observability.outages import outages
from torchtitan_rl_ft.observability.run_members import Members
from torchtitan_rl_ft.observability.slots import Slots


def a_run_with_a_relay_that_dies() -> Log:
    log = Log(engines=1)
    log.start()
    log.spawn("relay-0", by="serving")
    log.emit("serving", Kind.READY, subject="relay-0", url="http://x")
    log.now_s += 5
    log.emit("serving", Kind.EXIT, subject="relay-0", phase="fault", cause="killed by SIGKILL")
    log.emit("serving", Kind.RESTART, subject="relay-0", cause="killed by SIGKILL", attempt=2)
    log.spawn("relay-0", by="serving")
    log.emit("serving", Kind.READY, subject="relay-0", url="http://x")
    log.emit("serving", Kind.FETCH, subject="relay-0", step=1, seconds=0.1)
    return log


def members_of(log: Log) -> Members:
    members = Members()
    for event in log.events:
        members.add(json.loads(event.to_line()))
    return members


def test_a_relay_is_a_process_with_restarts_of_its_own_kind() -> None:
    members = members_of(a_run_with_a_relay_that_dies())
    relay = members.roles["relay-0"]
    assert (relay.state, relay.restarts, relay.reason) == ("up", 1, "killed by SIGKILL")
    assert members.restarts["relay"] == 1


def test_it_is_no_place_of_work_and_its_loss_no_outage() -> None:
    log = a_run_with_a_relay_that_dies()
    assert outages(log.events) == []
    work = Slots()
    for event in log.events:
        work.add(event)
    work.settle()
    assert set(work.slots) == {"trainer-0", "engine-0"}


def test_it_ends_with_serving() -> None:
    log = a_run_with_a_relay_that_dies()
    log.emit("supervisor", Kind.EXIT, subject="serving", phase="fault", cause="killed by SIGKILL")
    relay = members_of(log).roles["relay-0"]
    assert (relay.state, relay.pid) == ("ended", None)
