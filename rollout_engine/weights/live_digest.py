"""The digest of the live weights, while it is known: not between the commit of an update and its confirmation."""

from collections.abc import Callable, Mapping, Sequence

from sync.manifest import TensorSpec, total_digest


class LiveDigest:
    """Equal for engines with equal weights, whichever names and updates brought them.

    Args:
        compute: the digest of the live weights, read anew.
        names: the names that it is made over, each weight once.
    """

    def __init__(self, compute: Callable[[], str], names: Sequence[str]) -> None:
        self._compute, self._names = compute, names
        self._is_kept = False
        self.value: str | None = None
        """The digest; None while it is not known, and if it is not kept. Weights that are dirty have none either."""

    def keep(self) -> None:
        """Keep it up to date from now on. Raises as `WeightUpdater.digest`."""
        self._is_kept = True
        self.value = self._compute()

    def forget(self) -> None:
        """Live weights change now."""
        self.value = None

    def confirm(self, specs: Mapping[str, TensorSpec]) -> None:
        """The weights that were committed are live. `specs`: of those that were read again; of others they are read."""
        if not self._is_kept:
            return
        if all(name in specs for name in self._names):
            self.value = total_digest(specs[name] for name in self._names)
        else:
            self.value = self._compute()
