"""Releases of trainers' packages that the adapters here are tested with."""

import importlib.metadata
import logging
from typing import NamedTuple

from rollout_engine.base.errors import ConfigError

logger = logging.getLogger("rollout_engine")


class Package(NamedTuple):
    """A package, and the release of it that an adapter's tests run with."""

    title: str
    """The name as people write it."""
    distribution: str
    """Its name for pip, and the name of our extra for it."""
    release: str
    """The first parts of its version."""

    def check(self) -> None:
        """Log a warning unless this release is installed. Raises `ConfigError` if the package is not."""
        installed = self.find_version()
        if not f"{installed}.".startswith(f"{self.release}."):
            logger.warning(
                "%s %s is installed, and this adapter is tested with %s %s. Where it misbehaves: pip install %r",
                self.title,
                installed,
                self.title,
                self.release,
                self._requirement,
            )

    def find_version(self) -> str:
        """The version that is installed. Raises `ConfigError` if there is none."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError as problem:
            raise self.missing() from problem

    def missing(self) -> ConfigError:
        """The error for a package that is not installed."""
        return ConfigError(f"{self.title} is not installed: pip install 'rollout-engine[{self.distribution}]'.")

    def make_missing_error(self, what: str) -> ConfigError:
        """The error for a package that lacks a name its adapter needs; `what` is the name and its place."""
        return ConfigError(
            f"{what}, which this adapter needs; it is tested with {self.title} {self.release}, and {self.title} "
            f"{self.find_version()} is installed. pip install {self._requirement!r}"
        )

    @property
    def _requirement(self) -> str:
        return f"{self.distribution}=={self.release}.*"
