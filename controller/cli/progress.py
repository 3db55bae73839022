"""Progress of long start-up work: a bar in a terminal, plain lines elsewhere.

Owns how progress looks. Must not know what is being done.
"""

from __future__ import annotations

import io
import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class CurrentStderr(io.TextIOBase):
    """Writes to whatever `sys.stderr` is at that moment.

    A drawn bar replaces it while it is shown, so that lines appear above the bar and not in it.
    """

    def write(self, text: str) -> int:
        """Write text; returns its length."""
        return sys.stderr.write(text)

    def flush(self) -> None:
        """Flush what was written."""
        sys.stderr.flush()


class StartupProgress:
    """Callable with (done, total, description); one bar per kind of work."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar = (
            Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            if self._console.is_terminal
            else None
        )
        self._task: TaskID | None = None
        self._last_line = ""

    def __enter__(self) -> StartupProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int, description: str) -> None:
        """Show that `done` of `total` steps are finished and what comes next."""
        if self._bar is None:
            if done < total and description != self._last_line:
                print(f"paceline: {description} …", file=sys.stderr, flush=True)
                self._last_line = description
            return
        if self._task is None:
            self._task = self._bar.add_task(description, total=total)
        self._bar.update(self._task, completed=done, total=total, description=description)
        if done >= total:
            self._bar.remove_task(self._task)
            self._task = None
