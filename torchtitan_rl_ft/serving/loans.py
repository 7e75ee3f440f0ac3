"""Places that are lent to trainers, on disk: a later serving role starts no engine there."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtitan_rl_ft.run_folder import write_atomic
from torchtitan_rl_ft.session_folder import SessionUnreadable

FILE_NAME = "loans.json"


class LoansCorrupt(SessionUnreadable):
    """The file cannot be read; a trainer may be running where an engine would be started."""


@dataclass(frozen=True)
class Loan:
    slot: int
    attempt: str
    """The job that has it; empty: of a session that no job owns."""

    borrower: str
    """A name that the job gives the loan, so that it is granted once; empty: none."""

    def __str__(self) -> str:
        return self.borrower or "a trainer"


class Loans:
    """The file. Methods that write are durable when they return; call them in a thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loans: dict[int, Loan] = {}
        self._lock = threading.Lock()

    def read(self) -> dict[int, Loan]:
        """What an earlier serving role has lent, by slot. Raises LoansCorrupt."""
        try:
            given = json.loads(self._path.read_bytes())
            loans = [Loan(int(x["slot"]), str(x["attempt"]), str(x["borrower"])) for x in given]
        except FileNotFoundError:
            loans = []
        except (ValueError, KeyError, TypeError) as e:
            raise LoansCorrupt(
                f"{self._path} cannot be read ({type(e).__name__}: {e}): end the job's trainers "
                "and remove the file"
            ) from e
        with self._lock:
            self._loans = {loan.slot: loan for loan in loans}
            return dict(self._loans)

    def put(self, loan: Loan) -> None:
        with self._lock:
            self._loans[loan.slot] = loan
            self._write()

    def remove(self, loan: Loan) -> None:
        """Nothing when its place has been lent anew meanwhile."""
        with self._lock:
            if self._loans.get(loan.slot) is loan:
                del self._loans[loan.slot]
                self._write()

    def save(self) -> None:
        """Write the file again: somebody has removed it."""
        with self._lock:
            if self._loans:
                self._write()

    def _write(self) -> None:
        data = [asdict(loan) for _, loan in sorted(self._loans.items())]
        write_atomic(self._path, json.dumps(data, indent=1).encode())
