"""What a worker's memory is used for, now: between `sleep` and `wake_up` it tells what is left."""

from worker_ext.base import WorkerExtension, rpc


class MemoryExtension(WorkerExtension):
    """Reads; it is the engine's `sleep` and `wake_up` that change it."""

    @rpc
    def get_memory_usage(self) -> dict[str, int]:
        """Bytes resident: "weights", "derived" (packed copies, and those of an update), "kv_cache", "process" (all)."""
        return self.worker.memory_usage()
