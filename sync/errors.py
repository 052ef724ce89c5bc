"""Errors of weight transport. Torch-free, so that every floor above may import them.

SyncError
├── ManifestMismatch      the tensors offered are not the tensors expected
├── StaleVersion          the version does not move forward
├── ChecksumMismatch      bytes arrived that are not the bytes sent
└── TransferTimeout       the other side did not answer in time
"""


class SyncError(Exception):
    """Root of everything that can go wrong while weights travel."""


class ManifestMismatch(SyncError):
    """Names, shapes, dtypes or tied aliases differ from what the receiver holds; or files from their manifest."""


class StaleVersion(SyncError):
    """The offered version is not newer than the live one."""


class ChecksumMismatch(SyncError):
    """A digest of received or live bytes differs from the manifest, or a value is not finite."""


class TransferTimeout(SyncError):
    """A peer did not come, or stopped answering, before the deadline."""
