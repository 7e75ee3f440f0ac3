"""Signals as a terminal would have them, whatever the tests were started by."""

import signal


def pytest_sessionstart() -> None:
    """What nohup, or a shell in the background, has ignored stays without effect here, but is not
    handed down: a handler is, unlike "ignored", the default again in the programs that are run."""
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)
