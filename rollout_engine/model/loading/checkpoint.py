"""Finds a checkpoint directory, locally or on the hub, and lists its tensors. Only safetensors is read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HFValidationError

from rollout_engine.errors import ConfigError
from rollout_engine.locations import describe_missing, located
from sync.checkpoint import INDEX_FILE, SINGLE_FILE, StoredTensor, is_checkpoint, read_checkpoint
from sync.errors import SyncError

DESCRIPTION_FILES = ["*.json", "*.jinja", "tokenizer*", "*.model", "*.txt"]
STATE_FILE = "sharded.json"
"""The list of a sharded state (`sharded_state`), which is no checkpoint."""
_SECOND_COPIES = ["*/*", "consolidated*"]
"""The same weights again, in formats of other programs."""


def find_directory(model: str, *, weights: bool) -> Path:
    """The local directory of `model`: a path, or a hub id, whose files are downloaded (`weights`: also its weights).

    Raises `ConfigError` when there is no such directory and the hub has none, or cannot be reached.
    """
    path = Path(located("model", model))
    if path.is_dir():
        return path
    wanted = DESCRIPTION_FILES + (["*.safetensors"] if weights else [])
    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=wanted, ignore_patterns=_SECOND_COPIES))
    except (OSError, HFValidationError) as problem:  # offline, absent and forbidden are all OSErrors
        missing = f"the path does not exist ({describe_missing(Path(model))})"
        advice = "Check the spelling, or download it where there is a network and give the directory."
        raise ConfigError(
            f"model='{model}': {missing}, and as a hub id it could not be fetched ({_first_line(problem)}). {advice}"
        ) from None


def read_entries(directory: Path) -> list[StoredTensor]:
    """Every tensor of the checkpoint, from the headers of its one file or of the shards its index names.

    Raises `ConfigError` naming the file, and the tensor where one is at fault: absent or cut files, headers that
    contradict the bytes, an index that contradicts the shards, files that are being rewritten.
    """
    if is_checkpoint(directory):
        with as_config_errors():
            return read_checkpoint(directory)
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
        f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}: give one with weights, or load_format='dummy'."
    )


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Re-raise errors of a checkpoint's files as `ConfigError`."""
    try:
        yield
    except SyncError as problem:
        raise ConfigError(str(problem)) from problem


def _first_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem).strip() else 'no details'}"
