"""A worker extension that counts what an engine holds."""

from worker_ext.base import WorkerExtension, rpc


class ExpertSizes(WorkerExtension):
    """Counts the values of experts."""

    @rpc
    def get_expert_sizes(self) -> list[int]:
        """Values of the experts of each layer."""
        state = self.worker.module.state_dict()
        return [tensor.numel() for name, tensor in state.items() if ".experts." in name]
