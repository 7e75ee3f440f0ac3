"""Writing of Chrome trace event JSON, which Perfetto and chrome://tracing read.

Format: "Trace Event Format" of the Chromium project. Times are whole microseconds. Within a track
(a thread, the spans of one id) times never go back: a clock that was set cannot make the file
invalid, because what would lie before the track's last time is moved there.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Any, Self, cast

from torchtitan_rl_ft.observability.json_text import text_of

LINES_AT_ONCE = 2000
COMPRESSION = 1  # of nine: four times as fast as the default, a third larger

Args = Mapping[str, Any]
NO_ARGS: Args = MappingProxyType({})


def text(value: Any) -> str:
    """As JSON. Numbers that JSON does not know (NaN) become null."""
    return text_of(value, compact=True)


class TraceFile:
    """A trace that is written event by event; the file is there once it is whole.

    Use as a context manager. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file, self._temp = _open_beside(path)
        self._lines: list[str] = []
        self._first = True
        self._pids = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if error is not None:
            with contextlib.suppress(OSError):  # what a full disk has not taken yet
                self._file.close()
            self._temp.unlink(missing_ok=True)

    def add(self, line: str) -> None:
        """One event, as JSON."""
        self._lines.append(line)
        if len(self._lines) >= LINES_AT_ONCE:
            self._flush()

    def close(self, about: Args) -> None:
        """Put the whole file in its place; `about` is what it says of itself."""
        self._flush()
        end = "]" if not self._first else '{"traceEvents":[]'
        self._file.write(f'{end},"displayTimeUnit":"ms","otherData":{text(about)}}}\n'.encode())
        self._file.close()
        os.replace(self._temp, self._path)

    def _flush(self) -> None:
        if self._lines:
            start = '{"traceEvents":[\n' if self._first else ",\n"
            self._first = False
            self._file.write((start + ",\n".join(self._lines)).encode())
            self._lines.clear()

    # Tracks -------------------------------------------------------------------------------

    def process(self, name: str) -> Process:
        """Shown in the order in which they are made."""
        self._pids += 1
        return Process(self, self._pids, name)


class Process:
    """A group of tracks."""

    def __init__(self, file: TraceFile, pid: int, name: str) -> None:
        self.file, self.pid, self._tids = file, pid, 0
        self._counted: dict[str, int] = {}
        for what, args in (
            ("process_name", {"name": name}),
            ("process_sort_index", {"sort_index": pid}),
        ):
            file.add(f'{{"ph":"M","name":"{what}","pid":{pid},"tid":0,"args":{text(args)}}}')

    def track(self, name: str) -> Track:
        self._tids += 1
        return Track(self, self._tids, name)

    def counter(self, at_us: int, name: str, values: Mapping[str, float]) -> None:
        at_us = self._counted[name] = max(at_us, self._counted.get(name, 0))
        self.file.add(
            f'{{"ph":"C","name":{text(name)},"pid":{self.pid},"ts":{at_us},"args":{text(values)}}}'
        )

    def span(
        self, start_us: int, end_us: int, name: str, cat: str, key: str, args: str = ""
    ) -> None:
        """A span of the asynchronous track (`cat`, `key`). Spans lie within one another, or side
        by side in the order of time: the caller sees to that. `args`: JSON of an object."""
        self.open(start_us, name, cat, key, args)
        self.shut(end_us, name, cat, key)

    def open(self, at_us: int, name: str, cat: str, key: str, args: str = "") -> None:
        """`name`, `cat` and `key` hold nothing that JSON escapes."""
        args = f',"args":{args}' if args else ""
        self.file.add(
            f'{{"ph":"b","name":"{name}","cat":"{cat}","id":"{key}","pid":{self.pid},"tid":0,'
            f'"ts":{at_us}{args}}}'
        )

    def shut(self, at_us: int, name: str, cat: str, key: str) -> None:
        self.file.add(
            f'{{"ph":"e","name":"{name}","cat":"{cat}","id":"{key}","pid":{self.pid},"tid":0,'
            f'"ts":{at_us}}}'
        )


class Track:
    """A thread's track: slices within slices, instants, ends of arrows."""

    def __init__(self, process: Process, tid: int, name: str) -> None:
        self._file, self._where = process.file, f'"pid":{process.pid},"tid":{tid}'
        self.last_us = 0
        self.depth = 0  # open slices
        for what, args in (
            ("thread_name", {"name": name}),
            ("thread_sort_index", {"sort_index": tid}),
        ):
            self._file.add(f'{{"ph":"M","name":"{what}",{self._where},"args":{text(args)}}}')

    def begin(self, at_us: int, name: str, args: Args = NO_ARGS) -> None:
        self._event("B", at_us, name, args)
        self.depth += 1

    def end(self, at_us: int, args: Args = NO_ARGS) -> None:
        """Of the slice that was begun last."""
        assert self.depth > 0
        self.depth -= 1
        self._event("E", at_us, None, args)

    def end_all(self, at_us: int, args: Args = NO_ARGS) -> None:
        while self.depth:
            self.end(at_us, args)

    def slice(self, start_us: int, end_us: int, name: str, args: Args = NO_ARGS) -> tuple[int, int]:
        """A whole slice, at least 2 us long, so that an arrow finds it; where it lies."""
        start_us = max(start_us, self.last_us)
        end_us = max(end_us, start_us + 2)
        extra = f',"dur":{end_us - start_us}'
        self._event("X", start_us, name, args, extra)
        self.last_us = end_us
        return start_us, end_us

    def instant(self, at_us: int, name: str, args: Args = NO_ARGS, scope: str = "t") -> None:
        """`scope`: t(hread), p(rocess), g(lobal)."""
        self._event("i", at_us, name, args, f',"s":"{scope}"')

    def arrow(self, phase: str, at_us: int, name: str, key: str) -> None:
        """`phase`: s(tart), t (on the way), f(inish). `at_us` is within a slice of this track."""
        bound = ',"bp":"e"' if phase == "f" else ""
        self._file.add(
            f'{{"ph":"{phase}","name":{text(name)},"cat":"flow","id":"{key}",{self._where},'
            f'"ts":{at_us}{bound}}}'
        )

    def _event(self, phase: str, at_us: int, name: str | None, args: Args, extra: str = "") -> None:
        at_us = self.last_us = max(at_us, self.last_us)
        named = f'"name":{text(name)},' if name is not None else ""
        more = f',"args":{text(args)}' if args else ""
        self._file.add(f'{{"ph":"{phase}",{named}{self._where},"ts":{at_us}{extra}{more}}}')


def _open_beside(path: Path) -> tuple[IO[bytes], Path]:
    """A temporary file beside `path`, compressed when the name of `path` ends in .gz."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.fchmod(fd, 0o644)
    if path.name.endswith(".gz"):
        os.close(fd)
        return cast(IO[bytes], gzip.open(name, "wb", compresslevel=COMPRESSION)), Path(name)
    return os.fdopen(fd, "wb"), Path(name)


@contextlib.contextmanager
def writing(path: Path, about: dict[str, Any]) -> Generator[TraceFile]:
    """A trace that is put in its place at the end, with what `about` holds then."""
    with TraceFile(path) as file:
        yield file
        file.close(about)
