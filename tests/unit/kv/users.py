"""Connectors of a user's, good and bad."""

from rollout_engine.kv.connector import KVConnectorStats


class Dictionary:
    """A good one: it keeps the frames that it is given."""

    def __init__(self, argument, max_bytes):
        self.argument, self.max_bytes, self.frames, self.is_closed = argument, max_bytes, {}, False

    def open(self, layout):
        return {"argument": self.argument, "max_bytes": str(self.max_bytes)}

    def meet(self, peers):
        self.peers = peers

    def fetch(self, keys):
        return lambda seconds: True

    def load(self, key):
        return self.frames.get(key)

    def save(self, key, data):
        self.frames[key] = data

    def holds(self, key):
        return key in self.frames

    def drop(self, keys):
        for key in keys:
            self.frames.pop(key, None)

    def reset(self):
        self.frames.clear()

    def stats(self):
        return KVConnectorStats(num_blocks=len(self.frames), num_loaded=99)

    def close(self):
        self.is_closed = True


class Failing(Dictionary):
    """Every call fails but those of the start."""

    def fail(self, *args):
        raise OSError("the store is gone")

    fetch = load = save = holds = drop = reset = stats = close = fail


class FailingWait(Dictionary):
    def fetch(self, keys):
        def wait(seconds):
            raise OSError("the store is gone")

        return wait


class FailingStart(Dictionary):
    def open(self, layout):
        raise OSError("no such host")


class OddMetadata(Dictionary):
    def open(self, layout):
        return {"port": 5}


class Unmade:
    def __init__(self, argument, max_bytes):
        raise SystemExit("never")


class Incomplete:
    def __init__(self, argument, max_bytes):
        pass

    def open(self, layout):
        return {}
