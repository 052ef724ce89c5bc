"""Weight transports: how a trainer's tensors reach an engine, and how both sides verify that they did.

`rollout_engine.base.errors` needs `sync.errors` without torch, so the public names are imported on first use (PEP 562).
"""

import importlib
from typing import Any

_HOME = {
    "make_sender": "sync.transports",
    "make_receiver": "sync.transports",
    "publish": "sync.store",
    "open_current": "sync.published",
    "serve_store": "sync.store_server",
    "StoreServer": "sync.store_server",
    "pull": "sync.store_pull",
    "PublishedWeights": "sync.published",
    "join_gathers": "sync.source",
    "WeightManifest": "sync.manifest",
    "TensorSpec": "sync.manifest",
    "WeightSender": "sync.base",
    "WeightReceiver": "sync.base",
    "WeightSource": "sync.base",
    "SyncError": "sync.errors",
    "ManifestMismatch": "sync.errors",
    "StaleVersion": "sync.errors",
    "ChecksumMismatch": "sync.errors",
    "GatherFailed": "sync.errors",
    "TransferTimeout": "sync.errors",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sync' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME))
