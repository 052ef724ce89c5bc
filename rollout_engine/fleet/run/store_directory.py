"""A directory for published weights, in shared memory if there is some."""

import os
import shutil
import tempfile
from pathlib import Path

from rollout_engine.children.guard import GUARD
from sync.locked_directories import PREFIX, SHARED_MEMORY, lock_directory


class StoreDirectory:
    """A directory of a random name, mode 0700, until `remove`, or until this process ends, however it does."""

    def __init__(self) -> None:
        place = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}fleet-", dir=place))
        GUARD.add_path(str(self.path))
        self._lock = lock_directory(self.path)

    def remove(self) -> None:
        """Remove it with all that is in it. Call it once."""
        shutil.rmtree(self.path, ignore_errors=True)
        GUARD.drop_path(str(self.path))
        os.close(self._lock)
