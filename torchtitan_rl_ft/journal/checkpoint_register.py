"""Which checkpoints a run has, which of them can be loaded, and what they allow to be freed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from torchtitan_rl_ft.journal import protocol
from torchtitan_rl_ft.journal.checkpoints import MARKER, Found
from torchtitan_rl_ft.journal.protocol import AttachAnswer, CheckpointRef, State
from torchtitan_rl_ft.journal.records import GENESIS
from torchtitan_rl_ft.journal.retention import superfluous
from torchtitan_rl_ft.journal.store import Journal

OnChain = Callable[[State], bool]
"""Is a state of the history that the ledger has now?"""


class CheckpointRegister:
    """Joins what the journal was told with the folders that there are."""

    def __init__(
        self,
        journal: Journal,
        *,
        flaw: Callable[[CheckpointRef], str | None],
        find: Callable[[], Sequence[Found]],
        keep: int,
    ) -> None:
        """`flaw` says why a checkpoint cannot be loaded, `find` which folders there are, the
        newest `keep` of which stay (0: all)."""
        self._journal, self._flaw, self._find, self._keep = journal, flaw, find, keep
        self._unusable: dict[str, str] = {}  # path of a checkpoint -> why

    def begin_after_newest(self) -> None:
        """A journal that is kept in memory knows of nothing before this start: the newest complete
        checkpoint says where it goes on. Of two of one step, the one that was written last."""
        if not (self._journal.forgetful and self._journal.unwritten):
            return
        newest: Found | None = None
        for found in sorted(self._find(), key=lambda f: (f.step, _written_s(f))):
            if found.token is not None and self.why_incomplete(_ref(found)) is None:
                newest = found
        if newest is None:
            self._journal.begin_after(State(0, GENESIS), None)
        else:
            self._journal.begin_after(_state(newest), newest.batch)
            self._journal.add_checkpoint(_ref(newest))

    def why_incomplete(self, checkpoint: CheckpointRef) -> str | None:
        return self._unusable.get(checkpoint.path) or self._flaw(checkpoint)

    def unusable(self, path: str, reason: str) -> bool:
        """It proved damaged while it was loaded, and is not offered again. False: known."""
        if path in self._unusable:
            return False
        self._unusable[path] = reason
        self.begin_after_newest()
        return True

    def saved(self, state: State) -> bool:
        """Is there a complete checkpoint of `state`?"""
        return any(
            State(c.step, c.token) == state and self.why_incomplete(c) is None
            for c in self._journal.checkpoints
        )

    def note_unreported(self, on_chain: OnChain) -> None:
        """Take note of complete checkpoints whose notice was lost: their marker is the commit,
        the notice is not."""
        known = {
            State(c.step, c.token)
            for c in self._journal.checkpoints
            if self.why_incomplete(c) is None
        }
        for found in self._find():
            if found.token is None or State(found.step, found.token) in known:
                continue
            if on_chain(State(found.step, found.token)):
                self._journal.add_checkpoint(CheckpointRef(found.step, found.token, found.path))
        self.free_covered(on_chain)

    def left_behind(self, answer: AttachAnswer) -> list[str]:
        """Why folders that the journal does not know of are not what a new process loads."""
        loaded = answer.checkpoint.step if answer.checkpoint else 0
        known = {State(c.step, c.token) for c in self._journal.checkpoints}
        return [
            f"{found.path}: {self._unusable.get(found.path) or self._left_why(found)}"
            for found in self._find()
            if found.step > loaded
            and (found.token is None or State(found.step, found.token) not in known)
        ]

    def _left_why(self, found: Found) -> str:
        if (why := self._flaw(_ref(found))) is not None:
            return why
        superseded = protocol.SUPERSEDED.format(step=found.step)
        return "its marker is of another format" if found.token is None else superseded

    def superfluous(self, on_chain: OnChain, being_saved: Collection[State]) -> list[str]:
        """Paths of checkpoints that need not be kept."""
        return superfluous(
            self._find(),
            keep=self._keep,
            on_chain=on_chain,
            why_incomplete=self.why_incomplete,
            being_saved=being_saved,
        )

    def free_covered(self, on_chain: OnChain, but: Sequence[str] = ()) -> None:
        """Free the batches that the *oldest* complete checkpoint of this history covers, those
        `but` about to be removed aside: a newer one may turn out torn."""
        gone = {Path(path).name for path in but}
        for checkpoint in reversed(self._journal.checkpoints):
            if Path(checkpoint.path).name in gone:
                continue
            if (
                on_chain(State(checkpoint.step, checkpoint.token))
                and self.why_incomplete(checkpoint) is None
            ):
                self._journal.free_through(checkpoint.step)
                return


def _state(found: Found) -> State:
    return State(found.step, found.token or "")


def _ref(found: Found) -> CheckpointRef:
    return CheckpointRef(found.step, found.token or "", found.path)


def _written_s(found: Found) -> float:
    """Unix time of its marker; 0 without one."""
    try:
        return (Path(found.path) / MARKER).stat().st_mtime
    except OSError:
        return 0.0
