"""Checkpoints of adapters on disk, by Tinker's addresses.

    tinker://MODEL/weights/NAME            DIRECTORY/MODEL/weights/NAME           with the optimizer's state
    tinker://MODEL/sampler_weights/NAME    DIRECTORY/MODEL/sampler_weights/NAME   to sample with

Each is a directory in PEFT's format, and tinker.json. It is written under another name and renamed: whole or absent.
"""

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.lora_training import LoraShape

Kind: TypeAlias = Literal["weights", "sampler_weights"]
_KINDS: tuple[Kind, ...] = ("weights", "sampler_weights")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.:-]{0,199}")
_ABOUT = "tinker.json"


class About(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of tinker.json."""

    base_model: str
    shape: LoraShape
    saved_at: float
    """Seconds since 1970."""
    expires_at: float | None = None
    """None: never."""
    user_metadata: dict[str, str] | None = None
    """Notes that the client gave with the checkpoint."""
    model_metadata: dict[str, str] | None = None
    """Notes that the client gave when it created the model."""


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint on disk."""

    model_id: str
    kind: Kind
    name: str
    directory: Path
    about: About

    @property
    def path(self) -> str:
        """Its address."""
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


class Checkpoints:
    """All checkpoints below one directory. Its methods read and write files: call them on a thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.expanduser().absolute()

    def save(
        self, model_id: str, kind: Kind, name: str, about: About, write: Callable[[Path], None], *, overwrite: bool
    ) -> Checkpoint:
        """Have `write` fill a directory. Raises `RequestError` for a name that is taken, unless to `overwrite` it."""
        directory = self._place(model_id, kind, name)
        self.list(model_id)  # deletes those that have expired
        if not overwrite and directory.exists():
            hint = "Save under another name, or with overwrite=True."
            raise RequestError.for_field("path", name, f"a new name among the {kind} of {model_id}", hint)
        fresh = directory.with_name(f".{name}.part")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        try:
            write(fresh)
            fresh.joinpath(_ABOUT).write_bytes(msgspec.json.encode(about))
            shutil.rmtree(directory, ignore_errors=True)
            fresh.rename(directory)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        return Checkpoint(model_id, kind, name, directory, about)

    def find(self, path: str) -> Checkpoint:
        """The checkpoint at an address. Raises `RequestError` for one that is malformed, unknown or expired."""
        found = self._read(*self._parse(path))
        if found is None:
            hint = "Give a path that save_state or save_weights_for_sampler of this server returned."
            raise RequestError.for_field("path", path, "the path of a checkpoint that is here", hint)
        return found

    def list(self, model_id: str) -> list[Checkpoint]:
        """All of one model, oldest first."""
        places = [(kind, each.name) for kind in _KINDS for each in self._folder(model_id, kind).glob("[!.]*")]
        found = [self._read(model_id, kind, name) for kind, name in places]
        return sorted((each for each in found if each is not None), key=lambda each: each.about.saved_at)

    def delete(self, path: str) -> None:
        """Delete the checkpoint at an address. Raises `RequestError` if there is none."""
        shutil.rmtree(self.find(path).directory, ignore_errors=True)

    def _parse(self, path: str) -> tuple[str, Kind, str]:
        model_id, _, rest = path.removeprefix("tinker://").partition("/")
        kind, _, name = rest.partition("/")
        for each in _KINDS:
            if each == kind and path.startswith("tinker://"):
                return model_id, each, name
        bound = "tinker://MODEL/weights/NAME or tinker://MODEL/sampler_weights/NAME"
        raise RequestError.for_field("path", path, bound)

    def _read(self, model_id: str, kind: Kind, name: str) -> Checkpoint | None:
        """A checkpoint; None if there is none, or it has expired: then it is deleted."""
        directory = self._place(model_id, kind, name)
        try:
            about = msgspec.json.decode(directory.joinpath(_ABOUT).read_bytes(), type=About)
        except (OSError, msgspec.MsgspecError):
            return None
        if about.expires_at is not None and about.expires_at <= time.time():
            shutil.rmtree(directory, ignore_errors=True)
            return None
        return Checkpoint(model_id, kind, name, directory, about)

    def _folder(self, model_id: str, kind: Kind) -> Path:
        if not _NAME.fullmatch(model_id):
            raise RequestError.for_field("model_id", model_id, "the id of a model, as create_model returns it")
        return self._directory / model_id / kind

    def _place(self, model_id: str, kind: Kind, name: str) -> Path:
        if not _NAME.fullmatch(name):
            bound = "up to 200 letters, digits, '_', '-', '.' and ':', the first of them no '.'"
            raise RequestError.for_field("path", name, bound)
        return self._folder(model_id, kind) / name
