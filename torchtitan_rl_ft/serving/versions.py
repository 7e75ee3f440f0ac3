"""Policy versions: numbers that only grow, kept in the run folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from torchtitan_rl_ft.run_folder import write_atomic
from torchtitan_rl_ft.weights.manifest import MANIFEST_FILE
from torchtitan_rl_ft.weights.transports.base import Release

KEPT_RELEASES = 2
VERSIONS_FILE = "versions.json"


class VersionsCorrupt(Exception):
    """The file of versions cannot be read; going on could give a number out twice."""


class VersionStore:
    """The releases of a run, newest last. The next number survives everything but the loss of
    the file. Raises VersionsCorrupt."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / VERSIONS_FILE
        self._next = 1
        self._releases: list[Release] = []
        try:
            data = json.loads(self._path.read_bytes())
            self._next = int(data["next"])
            self._releases = [Release.from_json(r) for r in data["releases"]]
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError) as e:
            raise VersionsCorrupt(f"{self._path} cannot be read ({e}); restore or remove it") from e

    @property
    def next(self) -> int:
        """The number of the next release."""
        return self._next

    def raise_to(self, number: int) -> None:
        """Give no number below `number` out; durable when this returns."""
        self._next = max(self._next, number)
        self._write()

    @property
    def newest(self) -> Release | None:
        return self._releases[-1] if self._releases else None

    def find(self, step: int, token: str) -> Release | None:
        """The newest release of this state of the trainer."""
        for release in reversed(self._releases):
            if (release.step, release.token) == (step, token):
                return release
        return None

    def of(self, version: int) -> Release | None:
        return next((r for r in self._releases if r.version == version), None)

    def add(
        self,
        step: int,
        token: str,
        path: Path | None,
        manifest_digest: str,
        layout_digest: str = "",
        nbytes: int = 0,
    ) -> Release:
        """A release with the next number, durable when this returns. Without a path it is in the
        memory of holders, as an image of that layout and size."""
        where = "" if path is None else str(path)
        release = Release(self._next, step, token, where, manifest_digest, layout_digest, nbytes)
        self._next += 1
        self._releases.append(release)
        self._write()
        return release

    def prune(self, needed: Iterable[int]) -> list[Release]:
        """Forget releases that are neither among the newest nor `needed`, and remove their
        folders. A folder outside the run's own weights is left alone; holders use the memory of
        what nobody needs again by themselves."""
        keep = {r.version for r in self._releases[-KEPT_RELEASES:]} | set(needed)
        gone = [r for r in self._releases if r.version not in keep]
        if not gone:
            return []
        self._releases = [r for r in self._releases if r.version in keep]
        self._write()
        kept_paths = {r.path for r in self._releases}
        for release in gone:
            path = Path(release.path)
            ours = bool(release.path) and path.parent == self._folder
            if ours and release.path not in kept_paths:
                # Without its manifest the folder is incomplete, whatever happens next.
                (path / MANIFEST_FILE).unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)
        return gone

    def _write(self) -> None:
        data = {"next": self._next, "releases": [r.to_json() for r in self._releases]}
        write_atomic(self._path, json.dumps(data, indent=1).encode())
