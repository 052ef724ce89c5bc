"""Reports a worker's memory usage; between `sleep` and `wake_up`, that of what is still resident."""

from worker_ext.base import WorkerExtension, rpc


class MemoryExtension(WorkerExtension):
    """Reads memory usage; the engine's `sleep` and `wake_up` change it."""

    @rpc
    def get_memory_usage(self) -> dict[str, int]:
        """Bytes resident: "weights", "derived" (packed copies, and those of an update), "kv_cache", "process" (all).

        With a draft model also "draft_model": all of it.
        """
        return self.worker.memory_usage()
