"""The receiving end of a transport, on a thread."""

import threading

from sync.errors import SyncError


class Receiving(threading.Thread):
    """Receives on a thread; `tensors` or `problem` when joined."""

    def __init__(self, receiver, manifest, stop_after=None):
        super().__init__()
        self.receiver, self.manifest, self.stop_after = receiver, manifest, stop_after
        self.tensors, self.problem = {}, None
        self.start()

    def run(self):
        try:
            for name, tensor in self.receiver.receive(self.manifest):
                self.tensors[name] = tensor.clone()
                if len(self.tensors) == self.stop_after:
                    break
        except SyncError as problem:
            self.problem = problem
