"""A worker extension that counts the values that an engine holds, and keeps it busy."""

import time

from worker_ext.base import WorkerExtension, rpc


class ExpertSizes(WorkerExtension):
    """Counts values of weights."""

    @rpc
    def get_expert_sizes(self) -> list[int]:
        """Values of the experts of each layer."""
        state = self.worker.module.state_dict()
        return [tensor.numel() for name, tensor in state.items() if ".experts." in name]

    @rpc
    def get_weight_size(self) -> int:
        """Values of all weights, without those of other ranks."""
        return sum(tensor.numel() for tensor in self.worker.module.state_dict().values())

    @rpc
    def be_busy(self, seconds: float) -> None:
        """Let the engine take no message meanwhile."""
        time.sleep(seconds)
