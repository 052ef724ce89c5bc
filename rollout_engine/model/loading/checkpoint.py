"""Lists the tensors of a checkpoint directory: safetensors, or one GGUF file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_engine.base.errors import ConfigError
from rollout_engine.base.gguf.header import SUFFIX
from rollout_engine.model.loading.gguf_weights import read_gguf
from sync.checkpoint import INDEX_FILE, SINGLE_FILE, is_checkpoint, read_checkpoint
from sync.errors import SyncError
from sync.quantised.reader import CheckpointTensor

STATE_FILE = "sharded.json"
"""The list of a sharded state (`sharded_state`), which is no checkpoint."""


def read_entries(directory: Path) -> list[CheckpointTensor]:
    """Every tensor of the checkpoint, from the headers of its one file or of the shards its index names.

    Raises `ConfigError` naming the file, and the tensor if one is at fault: absent or cut files, headers that
    contradict the bytes, an index that contradicts the shards, a quantised format that is not read, files that are
    being rewritten.
    """
    if is_checkpoint(directory):
        with as_config_errors():
            return read_checkpoint(directory)
    if files := sorted(directory.glob(f"*{SUFFIX}")):
        if len(files) > 1:
            raise ConfigError(f"{directory} has {len(files)} GGUF files; expected one, or {SINGLE_FILE}.")
        with as_config_errors():
            return [*read_gguf(files[0])]
    pickles = sorted(p.name for p in directory.glob("pytorch_model*.bin"))
    if pickles:
        raise ConfigError(
            f"{directory} has its weights in {pickles[0]}, a pickle, which can run code when read; only safetensors is "
            "loaded. Convert it: from_pretrained(...).save_pretrained(...) writes safetensors."
        )
    if (directory / STATE_FILE).is_file():
        raise ConfigError(
            f"{directory} is a sharded state, not a checkpoint: give load_format='sharded', and the "
            "tensor_parallel_size that it was saved with."
        )
    raise ConfigError(
        f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE} nor a GGUF file: give one with weights, or "
        "load_format='dummy'."
    )


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Re-raise errors of a checkpoint's files as `ConfigError`."""
    try:
        yield
    except SyncError as problem:
        raise ConfigError(str(problem)) from problem
