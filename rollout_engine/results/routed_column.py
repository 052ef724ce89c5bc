"""The routed experts of one sample: those of its prompt, which samples share, and a row for each sampled token."""

import numpy as np


class RoutedColumn:
    """Experts of every token of prompt and completion but the last."""

    def __init__(self) -> None:
        self._prompt: np.ndarray | None = None
        self._rows: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self._rows)

    def begin(self, rows: np.ndarray) -> None:
        """Set those of the prompt's tokens but the last, [P - 1, L, k]. The first that arrive stay."""
        if self._prompt is None:
            self._prompt = rows

    def append(self, row: np.ndarray) -> None:
        """Add those of one more token, [L, k]: of the one before a sampled token."""
        self._rows.append(row)

    def stacked(self, start: int) -> np.ndarray | None:
        """Those that arrived with the sampled tokens from `start` on, the prompt's with the first: [n, L, k].

        None if no token was sampled.
        """
        if not self._rows:
            return None
        assert self._prompt is not None, "they come with the first token"
        rows = np.array(self._rows[start:], self._prompt.dtype).reshape(-1, *self._prompt.shape[1:])
        return rows if start else np.concatenate([self._prompt, rows])
