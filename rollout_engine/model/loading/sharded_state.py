"""The weights of an engine in a directory, one file for each rank: written and read without a whole weight anywhere.

    config.json, tokenizer.json, ...     copies of the model's
    rank-0-of-2.safetensors              the parts of rank 0, by the module's own names; several files if asked for
    rank-1-of-2.safetensors
    sharded.json                         `ShardedState`: the dtype, and digests of config.json and of every tensor

All of it is written to a directory next to the one that is asked for, which takes its name once it is on the disk.
"""

import fnmatch
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import msgspec
import xxhash
from torch import Tensor

from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.base.locations import DESCRIPTION_FILES
from rollout_engine.model.loading.checkpoint import STATE_FILE, as_config_errors
from rollout_engine.model.loading.shard_files import ShardFiles, check_file_names
from rollout_engine.model.modules.loaded_model import ModelFiles
from sync.base import Metadata
from sync.checkpoint import CONFIG_FILE, read_tensor_file
from sync.errors import SyncError
from sync.file_snapshot import SnapshotFile
from sync.manifest import TensorSpec, WeightManifest, counted, decode_json, dtype_name, first_names
from sync.tensor_file import write_tensor_file
from sync.tensor_writer import HOST_WRITER

_FORM, _FORM_OF_PARTS = 1, 2
"""Version of the layout, and that of states which list their files. A reader refuses later ones."""
_NEW = "a directory that is not there yet, or is empty"
_NOT_COPIED = ("*.index.json", STATE_FILE)
_AGAIN = "Save the state again (save_sharded_state, or rollout-engine shard)."

WriteShards: TypeAlias = Callable[[Path], Sequence[list[TensorSpec]]]
"""Has every rank write its file into a directory; returns the tensors that each has written."""


class ShardedState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of sharded.json."""

    form: int
    dtype: str
    """Dtype of the engine that was saved."""
    config_digest: str
    has_columns: bool = False
    """Whether the ranks have columns of some weights, as they do if sums are split."""
    shards: list[WeightManifest]
    """The tensors of each rank; the version is the policy's when it was saved."""
    num_stages: int = 1
    """Stages that the layers were divided among."""
    files: list[list[str]] = []
    """The files of each rank, if they have other names than `ShardFiles` gives by default; else none."""

    @classmethod
    def read(cls, directory: Path, num_ranks: int, num_stages: int = 1) -> "ShardedState":
        """The state in a directory. Raises `ConfigError` if there is none, or one of another number of ranks.

        `num_ranks`: those of each stage.
        """
        path = directory / STATE_FILE
        if not os.path.lexists(path):
            raise ConfigError(
                f"load_format='sharded': {directory} has no {STATE_FILE}, so no sharded state was saved there, or not "
                "to its end. Give a directory that save_sharded_state has written, or load a checkpoint with "
                "load_format='auto'."
            )
        with as_config_errors():
            state = decode_json(SnapshotFile(path).content(), cls, f"{path} is damaged", f" {_AGAIN}")
            if state.form != (_FORM_OF_PARTS if state.files else _FORM):
                raise ConfigError(
                    f"{path} has form {state.form} of sharded states; this release reads forms {_FORM} and "
                    f"{_FORM_OF_PARTS}. {_AGAIN}"
                )
            if state.files and (problem := check_file_names(state.files, len(state.shards))):
                raise ConfigError(f"{path} is damaged: {problem}. {_AGAIN}")
            for shard in state.shards:
                shard.check()
        if state.num_stages != num_stages:
            raise ConfigError(
                f"pipeline_parallel_size={num_stages} is not allowed: {directory} was saved with "
                f"pipeline_parallel_size={state.num_stages}. Give that, or load the checkpoint that it was made from."
            )
        if len(state.shards) != num_ranks * num_stages:
            raise ConfigError(
                f"tensor_parallel_size={num_ranks} is not allowed: {directory} was saved with tensor_parallel_size="
                f"{len(state.shards) // num_stages}. Give that, or load the checkpoint that it was made from."
            )
        return state

    def check_description(self, directory: Path, config: bytes) -> None:
        """Raise `ConfigError` unless the bytes of config.json are those that belong to this state."""
        if xxhash.xxh3_128_hexdigest(config) != self.config_digest:
            raise ConfigError(
                f"{directory / CONFIG_FILE} is not the one that this sharded state was saved with, so its weights may "
                f"be another model's. Put that file back, or save the state again."
            )

    def check_dtype(self, asked: str) -> None:
        """Raise `ConfigError` for a dtype, one of `EngineConfig.dtype`, that the state does not have."""
        if asked not in ("auto", self.dtype):
            raise ConfigError(
                f"dtype='{asked}' is not allowed: the sharded state was saved by an engine of dtype='{self.dtype}'. "
                f"Leave dtype out, or load the checkpoint that it was made from."
            )

    def check_cut(self, directory: Path, *, has_columns: bool) -> None:
        """Raise `ConfigError` unless weights were cut as they are cut now: some by columns, or all by rows."""
        if has_columns != self.has_columns:
            saved, advice = "without deterministic=True, on devices", "Load it so"
            if has_columns:
                saved, advice = "by ranks that are exact", "Give deterministic=True"
            raise ConfigError(
                f"{directory} was saved {saved}. On devices, ranks without deterministic=True cut some weights "
                f"otherwise than exact ones do. {advice}, or load the checkpoint that it was made from."
            )

    def load(self, directory: Path, rank: int, targets: Mapping[str, Tensor]) -> None:
        """Fill `targets`, every weight of a rank once, from its files.

        Raises `ConfigError`, naming the file, and the tensor if one is at fault, unless they hold exactly these
        weights, each with its digest.
        """
        num_ranks = len(self.shards)
        names = self.files[rank] if self.files else [ShardFiles().name(rank, 0, num_ranks)]
        paths = [directory / name for name in names]
        for path in paths:
            if not os.path.lexists(path):
                raise ConfigError(
                    f"{path} is missing: the state has files for each of its {num_ranks} ranks. Copy the whole "
                    "directory, or save the state again."
                )
        shard = {spec.name: spec for spec in self.shards[rank].tensors}
        wanted = {n: (dtype_name(t.dtype), tuple(t.shape)) for n, t in targets.items()}
        _check_forms(paths[0], wanted, _forms_of(shard))
        with as_config_errors():
            entries = [entry for path in paths for entry in read_tensor_file(path)]
            found = {entry.name: (dtype_name(entry.dtype), entry.shape) for entry in entries}
            if found != _forms_of(shard) or len(found) != len(entries):
                which = " or ".join(map(str, paths[:3]))
                raise ConfigError(f"{which} does not have the tensors that {STATE_FILE} lists. {_AGAIN}")
            for entry in entries:
                if HOST_WRITER.read(targets[entry.name], entry.fetch).digest != shard[entry.name].digest:
                    raise ConfigError(
                        f"{entry.path}: '{entry.name}' does not have the digest that {STATE_FILE} lists: the file was "
                        f"changed or damaged, or is another save's. {_AGAIN}"
                    )
            for entry in entries:
                entry.check()


def write_shard(
    directory: Path,
    rank: int,
    num_ranks: int,
    forms: Metadata,
    live: Mapping[str, Tensor],
    files: ShardFiles = ShardFiles(),  # noqa: B008 (it is frozen)
) -> list[TensorSpec]:
    """Write the files of one rank; returns the specs of its tensors.

    Args:
        forms: (dtype, shape) of all names of `live`, and perhaps others.
        live: the rank's weights, each once; one at a time is asked for.
        files: how they are divided over files.

    Raises `RequestError` if a file cannot be written.
    """
    specs: list[TensorSpec] = []
    for part, own in enumerate(files.divide({name: forms[name] for name in live})):
        path = directory / files.name(rank, part, num_ranks)
        with _refusing(path):
            specs += write_tensor_file(path, own, live.__getitem__)
    return specs


def save_state(
    path: Path,
    files: ModelFiles,
    dtype: str,
    version: int,
    write_shards: WriteShards,
    *,
    has_columns: bool = False,
    shard_files: ShardFiles = ShardFiles(),  # noqa: B008 (it is frozen)
    num_stages: int = 1,
) -> None:
    """Write a sharded state to `path`, which may be an empty directory but not another one.

    `path` has all of it when this returns, and nothing after an error. Raises `RequestError` if it cannot be
    written, or the files of the model are not those that were loaded.
    """
    require_new(path)
    unfinished = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}")
    with _refusing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.mkdir()
        try:
            _copy_files(files, unfinished)
            shards = [WeightManifest.of(version, specs) for specs in write_shards(unfinished)]
            is_plain = shard_files.are_plain
            state = ShardedState(
                form=_FORM if is_plain else _FORM_OF_PARTS,
                dtype=dtype,
                config_digest=files.config_digest,
                has_columns=has_columns,
                shards=shards,
                files=[] if is_plain else shard_files.found_in(unfinished, len(shards)),
                num_stages=num_stages,
            )
            _write(unfinished / STATE_FILE, msgspec.json.encode(state))
            _sync_directory(unfinished)
            os.rename(unfinished, path)
            _sync_directory(path.parent)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def require_new(path: Path) -> None:
    """Raise `RequestError` if `path` exists, unless it is an empty directory."""
    with _refusing(path):
        is_new = not os.path.lexists(path) or (path.is_dir() and not os.listdir(path))
    if not is_new:
        raise _refused(path, "Nothing is written over: give another, or remove it first.", _NEW)


def _copy_files(files: ModelFiles, to: Path) -> None:
    for name in sorted(os.listdir(files.directory)):
        wanted = any(fnmatch.fnmatch(name, pattern) for pattern in DESCRIPTION_FILES)
        source = files.directory / name
        if wanted and source.is_file() and not any(fnmatch.fnmatch(name, pattern) for pattern in _NOT_COPIED):
            _write(to / name, source.read_bytes())
    config = to / CONFIG_FILE
    if not config.is_file() or xxhash.xxh3_128_hexdigest(config.read_bytes()) != files.config_digest:
        raise RequestError(
            f"save_sharded_state: {files.directory / CONFIG_FILE} has changed since the model was loaded, and a "
            "state has the configuration that its weights were loaded with. Put that file back."
        )


def _write(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _check_forms(path: Path, wanted: Metadata, found: Metadata) -> None:
    """Raise `ConfigError` unless a file has the forms of the model's weights, by name."""
    if wanted == found:
        return
    offenders = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    shown = (f"{name}: expected {wanted.get(name, 'none')}, found {found.get(name, 'none')}" for name in offenders)
    raise ConfigError(
        f"{path} is not of this model, which has another form of {counted(offenders, 'tensor', 'tensors')}: "
        f"{first_names(shown, 5)}. Give the directory as save_sharded_state has written it."
    )


def _forms_of(specs: Mapping[str, TensorSpec]) -> Metadata:
    return {name: (spec.dtype, spec.shape) for name, spec in specs.items()}


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Re-raise errors of the system as `RequestError` about `path`."""
    try:
        yield
    except (OSError, ValueError, SyncError) as problem:  # ValueError: a path with a NUL in it
        if isinstance(problem, RequestError):
            raise
        raise _refused(path, f"{type(problem).__name__}: {problem}.") from problem


def _refused(path: Path, why: str, bound: str = "a directory that can be written") -> RequestError:
    error = RequestError.for_field("path", str(path), bound, why)
    return RequestError(f"save_sharded_state: {error}", field="path", value=str(path), bound=error.bound)
