"""Errors of weight transport. Torch-free, so that every floor above may import them.

SyncError
├── ManifestMismatch      the tensors offered are not the tensors expected
├── StaleVersion          the version does not move forward
├── ChecksumMismatch      bytes arrived that are not the bytes sent
├── GatherFailed          a rank of the trainer left before a sharded weight was whole
└── TransferTimeout       the other side did not answer in time
"""


class SyncError(Exception):
    """Root of all errors of weight transport."""


class ManifestMismatch(SyncError):
    """Names, shapes, dtypes or tied aliases differ from those of the receiver; or files from their manifest."""


class StaleVersion(SyncError):
    """The offered version is not newer than the live one."""


class ChecksumMismatch(SyncError):
    """A digest of received or live bytes differs from the manifest, or a value is not finite."""


class TransferTimeout(SyncError):
    """A peer did not connect, or stopped answering, before the deadline."""


class GatherFailed(SyncError):
    """A weight that is sharded over the ranks of a trainer could not be gathered: one ended, or never joined."""
