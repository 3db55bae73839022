"""One writing process per SQLite database, kept by an advisory lock on a file beside it.

Owns the lock file. Must not touch the database itself.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from store.errors import DatabaseBusyError, DatabaseUnavailableError


class WriterLock:
    """An exclusive `flock` on `<database>.lock`, held until `release()`.

    The kernel drops the lock when its process dies, so a killed server leaves no stale lock; the
    process id inside the file is only for the message. The file itself stays: unlinking it would
    let two processes lock two different inodes.
    """

    def __init__(self, database_path: Path) -> None:
        self._path = database_path.with_name(database_path.name + ".lock")
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock or raise DatabaseBusyError naming the file and the holder. Never waits."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise DatabaseUnavailableError(
                f"cannot create {self._path}: {error.strerror or error}"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise DatabaseBusyError(
                f"another process (pid {holder or 'unknown'}) writes this database:"
                f" {self._path} is locked"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock back; harmless if it is not held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
