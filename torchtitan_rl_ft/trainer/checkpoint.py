"""Checkpoints that are one commit with the journal.

A checkpoint counts when its `commit.json` is there, written last (journal/checkpoints.py), and the
ledger has been told. Which one is loaded is the ledger's decision: it knows which histories its
checkpoints belong to. What is in one: TorchTitan's model, optimizer, scheduler and trainer state,
the random numbers of every rank, and what else was added by name (`add_part`).
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torchtitan.components.checkpoint import (
    DATALOADER,
    MODEL,
    OPTIMIZER,
    AsyncMode,
    CheckpointManager,
)

from torchtitan_rl_ft.journal.checkpoints import (
    MARKER,
    CheckpointDamaged,
    CheckpointUnusable,
    FileMark,
    Marker,
    damage,
    file_names,
    folder_name,
    mark_files,
    read_marker,
    write_marker,
)
from torchtitan_rl_ft.trainer.checkpoint_folder import Remover, reading, require_same_folder
from torchtitan_rl_ft.trainer.group_link import GroupLink
from torchtitan_rl_ft.trainer.random_state import RandomState

logger = logging.getLogger(__name__)

RNG = "rng"


class SaveDuty(Protocol):
    """Who may save, what is saved, and who is told (the trainer)."""

    def may_save(self, step: int) -> bool: ...

    def marker(self) -> Marker:
        """Of the state as it is now, without parts and files."""
        ...

    def saved(self, marker: Marker, path: str) -> list[str]:
        """The checkpoint is durable. Returns checkpoints that are not needed any more."""
        ...

    def save_failed(self, step: int, reason: str) -> None: ...

    def restored(self, marker: Marker, path: str, differs: list[str]) -> None:
        """`differs`: keys of the layout that are not those of the checkpoint."""
        ...


@dataclass(frozen=True)
class _Save:
    """A save that is not durable yet. `done`: this rank's files and what they hold."""

    marker: Marker
    path: Path
    done: Future[dict[str, FileMark]]


class RLCheckpointManager(CheckpointManager):
    """TorchTitan's DCP checkpoints, saved by one replica group at a time, loaded by decree."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def __init__(self, config: Config, *, ft_manager: Any = None, **kwargs: Any) -> None:
        """Raises CheckpointUnusable when the machine cannot save in this mode."""
        # TorchTitan's fault-tolerant trainer hands its manager over; healing does not go
        # through checkpoints here, so switching them off does not switch healing off.
        self._hashing = ThreadPoolExecutor(1, "checkpoint-hash")
        self._remover = Remover()
        _require_pinnable(config)
        super().__init__(config, **kwargs)
        self.leave_out(DATALOADER)  # the cursor is the journal's
        self._duty: SaveDuty | None = None
        self._link = GroupLink()
        self._decreed: Path | None = None
        self._restoring = False
        self._without_rng = False
        self._in_flight: _Save | None = None
        self._saves_last = True
        self._exiting = False

    def bind(
        self,
        duty: SaveDuty,
        link: GroupLink,
        random_state: RandomState,
        *,
        saves_last: bool = True,
    ) -> None:
        """`saves_last`: also off the interval, the natural last step is saved. Raises
        FoldersDiffer. Collective over the group."""
        self._duty, self._link, self._saves_last = duty, link, saves_last
        if self.enable:
            self.add_part(RNG, random_state)
            require_same_folder(Path(self.folder), link)

    # Parts ------------------------------------------------------------------------------

    def add_part(self, name: str, state: Any) -> None:
        """One more `Stateful` that a checkpoint has to hold to be gone on from."""
        if self.enable:
            self.states[name] = state

    def leave_out(self, name: str) -> None:
        """Neither save nor load a part: the state of an optimizer that has none."""
        if self.enable:
            del self.states[name]

    # Loading ----------------------------------------------------------------------------

    def restore(self, path: Path) -> None:
        """Load the checkpoint at `path`. Collective.

        Raises CheckpointDamaged when a file is not what was written, CheckpointUnusable when this
        job cannot go on from it, FileNotFoundError.
        """
        assert self._duty is not None
        with reading(path):
            marker = read_marker(path)
            here = self._duty.marker()
            self._require_whole(path, marker)
            self._require_fit(path, marker, here)
            differs = sorted(
                key
                for key in {*marker.layout, *here.layout}
                if marker.layout.get(key) != here.layout.get(key)
            )
            # Another layout has other ranks: the trainer seeds them.
            self._without_rng = bool(differs)
            self._load_decreed(marker.step, path)
        self._duty.restored(marker, str(path), differs)

    def load_initial(self) -> None:
        """Load what `initial_load_path` names; it may be of any layout."""
        self._without_rng = True
        self._load_decreed(-1, None)

    def _load_decreed(self, step: int, path: Path | None) -> None:
        self._decreed, self._restoring = path, True
        try:
            self.load(step=step)
        finally:
            self._restoring, self._decreed = False, None

    def _require_fit(self, path: Path, marker: Marker, here: Marker) -> None:
        metadata = FileSystemReader(path).read_metadata().state_dict_metadata
        if why := _other_model(metadata, self.states[MODEL].state_dict()):
            raise CheckpointUnusable(
                f"checkpoint {path} is of another model ({why}): set [model] to what it was, or "
                "job.dump_folder to another folder"
            )
        if marker.model != here.model:
            raise CheckpointUnusable(
                f"checkpoint {path} is of another model (its config.json differs, or its flavor): "
                "set [model] to what it was, or job.dump_folder to another folder"
            )
        wanted = [name for name in self.states if name not in self.exclude_from_loading]
        found = set(marker.parts) & _parts(metadata, self.states)
        for name in wanted:
            if name not in found:
                mend = "recovery.save_optimizer = false" if name == OPTIMIZER else ""
                raise CheckpointUnusable(
                    f"checkpoint {path} lacks {name!r}, without which the run cannot be gone on "
                    f"with{': it was saved with ' + mend if mend else ''}"
                )

    def _require_whole(self, path: Path, marker: Marker) -> None:
        """Ranks share the work of comparing contents."""
        names = sorted(marker.files)
        ranks = len(self._link.gather(None))
        mine = names[self._link.rank :: ranks]
        found = self._link.gather(damage(path, {name: marker.files[name] for name in mine}))
        if problems := [problem for problem in found if problem]:
            raise CheckpointDamaged(problems[0])

    def _load(self, step: int = -1) -> bool:
        """The base trainer's own load at start comes after the ledger's decree: nothing to do."""
        return super()._load(step) if self._restoring else False

    def _find_load_step(self, folder: str = "") -> int:
        """Stock picks the highest folder number, complete or not, of whatever history."""
        return -1

    def _states_to_load(self, model_only: bool) -> dict[str, Any]:
        if model_only:
            return self.states[MODEL].state_dict()
        left = {*self.exclude_from_loading, *([RNG] if self._without_rng else [])}
        return self._flattened_model_states_sd(
            {name: state for name, state in self.states.items() if name not in left}
        )

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        if self._decreed is not None:
            return str(self._decreed)
        assert self._duty is not None
        return str(Path(folder or self.folder) / folder_name(step, self._duty.marker().token))

    # Saving -----------------------------------------------------------------------------

    def save_for_exit(self, step: int) -> None:
        """Save the state of `step` as one to go on from: whole, whatever the last save of a run
        leaves out, and durable on return. Nothing to do when that step is saved."""
        self._exiting = True
        try:
            self.save(step)
            self.finish(wait=True)
        finally:
            self._exiting = False

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._exiting:
            return not self.load_only
        return super()._should_save(curr_step, last_step)

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        self.finish(wait=False)
        last_step = last_step and self._saves_last
        if self._duty is None or not self._should_save(curr_step, last_step):
            return False
        if not self._duty.may_save(curr_step):
            return False
        self.finish(wait=True)
        marker = self._duty.marker()
        path = Path(self._create_checkpoint_id(curr_step))
        if self._link.is_speaker:
            # Saved again, it must not look complete while it is overwritten.
            (path / MARKER).unlink(missing_ok=True)
        try:
            super()._save(curr_step, last_step)
        except CheckpointException as e:  # the same on all ranks
            self._give_up(marker, path, _write_failure(e))
            return False
        self._in_flight = _Save(marker, path, self._hashing.submit(self._mark, path))
        self.finish(wait=self.async_mode == AsyncMode.DISABLED or last_step)
        return True

    def _mark(self, path: Path) -> dict[str, FileMark]:
        """What this rank wrote, once it is on disk; the first rank also takes what is shared."""
        if self.save_future is not None:
            self.save_future.result()
        own, others = f"__{self._link.rank}_", "__"
        names = [
            name
            for name in file_names(path)
            if name.startswith(own) or (self._link.is_speaker and not name.startswith(others))
        ]
        return mark_files(path, names)

    def finish(self, wait: bool) -> None:
        """Mark and report a save that has become durable; `wait` for it if it has not. Collective
        while a save is in flight."""
        if not self.enable or self._in_flight is None or self._duty is None:
            return
        save = self._in_flight
        if not wait and not all(self._link.gather(save.done.done())):
            return
        self._in_flight = None
        marks: dict[str, FileMark] = {}
        why = None
        try:
            marks = save.done.result()
        except (CheckpointException, OSError) as e:
            why = _write_failure(e)
        self.save_future = None
        results = self._link.gather((why, marks))
        reasons = [reason for reason, _ in results if reason]
        if not reasons:
            files = {name: mark for _, marks in results for name, mark in marks.items()}
            reasons = self._link.ask(lambda: self._commit(save, files))
        if reasons:
            self._give_up(save.marker, save.path, reasons[0])
            return
        removable = self._duty.saved(save.marker, str(save.path))
        if self._link.is_speaker:
            self._remover.remove([Path(path) for path in removable])

    def _commit(self, save: _Save, files: Mapping[str, FileMark]) -> list[str]:
        """Write the marker. Returns why it could not be written, if so."""
        try:
            metadata = FileSystemReader(save.path).read_metadata()
            # What somebody has removed meanwhile was not hashed, and would not be missed.
            written = {info.relative_path for info in (metadata.storage_data or {}).values()}
            if gone := sorted(written - files.keys()):
                return [f"{save.path / gone[0]} was removed while it was saved"]
            parts = sorted(_parts(metadata.state_dict_metadata, self.states))
            write_marker(save.path, dataclasses.replace(save.marker, parts=parts, files=files))
        except OSError as e:
            return [_write_failure(e)]
        return []

    def _give_up(self, marker: Marker, path: Path, reason: str) -> None:
        """A checkpoint could not be written: the older ones and the journal still have it all."""
        assert self._duty is not None
        if self._link.is_speaker:
            there = next(parent for parent in path.parents if parent.exists())
            free = shutil.disk_usage(there).free // 2**20
            reason = f"{reason} ({free} MiB are free in {there})"
            shutil.rmtree(path, ignore_errors=True)  # gives the space back
        self._duty.save_failed(marker.step, reason)

    def _purge_stale_checkpoints(self) -> None:
        """Stock counts folders, torn ones and the one being written among them; here the ledger
        says which ones may go, once a newer one is durable."""

    def _close(self) -> None:
        self._hashing.shutdown()
        self._remover.wait()
        super()._close()


def _require_pinnable(config: CheckpointManager.Config) -> None:
    pinned = config.enable and config.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM
    if pinned and not torch.accelerator.is_available():
        raise CheckpointUnusable(
            "checkpoint.async_mode = async_with_pinned_mem copies from an accelerator, and this "
            "machine has none: set it to async"
        )


def _parts(metadata: Mapping[str, Any], states: Iterable[str]) -> set[str]:
    """Which of the named states a checkpoint holds: their keys begin with the name, the model's are
    all others."""
    others = [name for name in states if name != MODEL]
    found = {key.split(".", 1)[0] for key in metadata} & set(others)
    has_model = any(key.split(".", 1)[0] not in others for key in metadata)
    return found | ({MODEL} if has_model else set())


def _other_model(metadata: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """The first tensor that a checkpoint does not have, or in another shape; None: all fit."""
    for name, tensor in model.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        found = metadata.get(name)
        if not isinstance(found, TensorStorageMetadata):
            return f"it has no {name}"
        if found.size != tensor.shape:
            return f"{name} is {tuple(found.size)}, here {tuple(tensor.shape)}"
    return None


def _write_failure(error: CheckpointException | OSError) -> str:
    """What the disk said, in a line. Raises the error when it is of another kind."""
    causes: list[BaseException] = [error]
    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
    if not all(isinstance(cause, OSError) or _of_a_torn_stream(cause) for cause in causes):
        raise error
    return f"{type(causes[0]).__name__}: {causes[0]}".splitlines()[0]


def _of_a_torn_stream(error: BaseException) -> bool:
    """PyTorch's writer says so when the file did not take all that was written to it."""
    return isinstance(error, RuntimeError) and "inline_container" in str(error)
