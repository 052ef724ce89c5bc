"""Gathers the supports of one sample's tokens."""

import numpy as np

from rollout_engine.base.support import Support, too_many_support_ids


class SupportColumn:
    """One row of ids for each token of a sample, up to its share of the ids of a request."""

    def __init__(self, num_samples: int) -> None:
        """`num_samples`: of the request."""
        self._num_samples = num_samples
        self._rows: list[np.ndarray] = []
        self._num_ids = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def error(self) -> str | None:
        """Why the sample ends: its rows have more ids than its share; None: it does not."""
        return too_many_support_ids(self._num_ids, self._num_samples) or None

    def append(self, ids: np.ndarray) -> None:
        """Add the support of one more token, int32."""
        self._rows.append(ids)
        self._num_ids += len(ids)

    def stack(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """(int64 offsets, int32 ids) of the tokens from `start` on."""
        found = Support.of(self._rows[start:])
        return found.offsets, found.ids
