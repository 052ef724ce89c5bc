"""CURRENT of a store: the version that is current, and the directories that hold it.

A version that is whole has one directory. One that was published as changes (`delta=True`) has a chain of them: an
anchor, which is whole, and links, each with the changes against the version before it.
"""

import os
import re
from pathlib import Path

import msgspec

from sync.errors import ManifestMismatch
from sync.manifest import decode_json
from sync.own_files import opened_directory, read_small

CURRENT, LOCK, VERSIONS = "CURRENT", "LOCK", "versions"
MANIFEST, META, LEASE = "manifest.json", "meta.json", "lease"
LINK, CHANGES = "link.json", "changes"
MAX_LINKS = 256
"""Most links behind an anchor."""
_MAX_POINTER_BYTES = 1 << 17
_DIRECTORY = re.compile(r"[0-9]{6,19}(-[0-9]{1,9})?")


class Pointer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of CURRENT, or one step of a chain."""

    version: int
    directory: str
    """Name in `versions/`: the version in at least six digits, then `-1`, `-2`, ... if that was taken."""
    manifest_digest: str
    """xxh3-128 of the bytes of its manifest.json."""
    link_digest: str = ""
    """xxh3-128 of the bytes of its link.json, if it is a link; of an anchor: empty."""
    before: tuple["Pointer", ...] = ()
    """The steps that a link needs, the anchor first; they have none themselves."""

    @property
    def steps(self) -> tuple["Pointer", ...]:
        """The whole chain, from the anchor to this version."""
        return (*self.before, self)

    @property
    def anchor(self) -> "Pointer":
        """The whole version at the beginning of the chain."""
        return self.steps[0]

    def link_to(self, version: int, directory: str, manifest_digest: str, link_digest: str) -> "Pointer":
        """The pointer to a link on top of this version."""
        steps = tuple(msgspec.structs.replace(step, before=()) for step in self.steps)
        return Pointer(version, directory, manifest_digest, link_digest, steps)


def is_store(directory: Path) -> bool:
    """Whether something has been published in `directory`, be it damaged."""
    return os.path.lexists(directory / CURRENT)


def read_pointer(directory: Path) -> Pointer:
    """The content of CURRENT. `ManifestMismatch` if there is none, or it is damaged."""
    try:
        with opened_directory(directory) as store:
            content = read_small(CURRENT, _MAX_POINTER_BYTES, dir_fd=store)
    except FileNotFoundError:
        if not directory.exists():
            raise ManifestMismatch(f"{directory.absolute()} does not exist: give the path of a store.") from None
        what = "holds a bare memory-mapped TensorDict" if (directory / META).exists() else "is not a published store"
        advice = "sync.publish(directory, source, version) makes one."
        raise ManifestMismatch(f"{directory} {what}: it has no {CURRENT} file. {advice}") from None
    except OSError as problem:
        raise unusable(directory, problem) from None
    pointer = decode_json(content, Pointer, f"{directory / CURRENT} is damaged", " Publish again.")
    check_pointer(pointer, f"{directory / CURRENT} is damaged")
    return pointer


def check_pointer(pointer: Pointer, where: str) -> None:
    """Raise `ManifestMismatch`, beginning with `where`, unless all steps name versions and make a chain."""
    if not all(_DIRECTORY.fullmatch(step.directory) for step in pointer.steps):
        raise ManifestMismatch(f"{where}: it names no version. Publish again.")
    is_chain = not pointer.anchor.link_digest and all(step.link_digest for step in pointer.steps[1:])
    if not is_chain or len(pointer.before) > MAX_LINKS or any(step.before for step in pointer.before):
        expected = f"expected an anchor and at most {MAX_LINKS} links"
        raise ManifestMismatch(f"{where}: its {len(pointer.steps)} steps are no chain ({expected}). Publish again.")


def unusable(directory: Path, problem: OSError) -> ManifestMismatch:
    """The error if a part of the store at `directory` cannot be opened."""
    part = "" if problem.filename == os.fspath(directory) else f": {problem.filename}"
    return ManifestMismatch(f"{directory}{part} cannot be used: {problem.strerror}. Mend that, or publish again.")
