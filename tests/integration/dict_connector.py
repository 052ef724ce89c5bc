"""KV connectors of users, as tests have them: dicts of this process by the name that is their argument."""

import os
import threading
from pathlib import Path

from rollout_engine.kv.connector import KVConnectorStats

BLOCKS = {}
"""Name -> key -> bytes."""
RELEASED = threading.Event()
"""Releases connectors that hang."""


class Dict:
    """Holds everything; `misdeed` is what a subclass does in place of a load."""

    def __init__(self, argument, max_bytes):
        self.name = argument
        self.blocks = BLOCKS.setdefault(argument, {})

    def open(self, layout):
        return {"name": self.name}

    def meet(self, peers):
        pass

    def fetch(self, keys):
        return None

    def load(self, key):
        return self.blocks.get(key)

    def save(self, key, data):
        self.blocks[key] = bytes(data)

    def holds(self, key):
        return key in self.blocks

    def drop(self, keys):
        for key in keys:
            self.blocks.pop(key, None)

    def reset(self):
        self.blocks.clear()

    def stats(self):
        return KVConnectorStats(num_blocks=len(self.blocks), num_bytes=sum(map(len, self.blocks.values())))

    def close(self):
        pass


class Raising(Dict):
    def load(self, key):
        raise OSError("no such luck")


class Short(Dict):
    def load(self, key):
        return super().load(key)[:-1]


class Mixing(Dict):
    """Gives the bytes of another key."""

    def load(self, key):
        return next(data for other, data in self.blocks.items() if other != key)


class Nothing(Dict):
    def load(self, key):
        return None


class Hanging(Dict):
    def load(self, key):
        RELEASED.wait(60)
        return None


class NeverFetched(Dict):
    def fetch(self, keys):
        return lambda seconds: False


class NotOpening(Dict):
    def open(self, layout):
        raise OSError("no door")


class Meeting(Dict):
    """Writes who it has met to a file of its process in the directory that is its argument."""

    def open(self, layout):
        return {"name": str(os.getpid())}

    def meet(self, peers):
        Path(self.name, str(os.getpid())).write_text(" ".join(sorted(peer["name"] for peer in peers)))
