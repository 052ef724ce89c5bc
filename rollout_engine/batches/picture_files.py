"""Pictures of rollouts as files: the folder `pictures` next to a file of rollouts, with two files for each picture.

    file             content
    <digest>.npz     the arrays that the model got, as numpy writes them, without pickle
    <digest>.png     the picture as the model saw it, to look at; absent if the arrays are of an unknown form

A picture is written once, however many samples have it: lines name it by its digest. In a sample "pictures" is a list
of {"start", "end", "picture"}: the span of positions in prompt and response together, and the picture: a `Picture` in
memory, and its digest in a file, whose reader adds the folder as "picture_folder".
"""

import math
import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import Picture, PlacedPicture
from rollout_engine.base.whole_files import whole_file
from rollout_engine.batches.picture_images import png_of

FOLDER = "pictures"
"""Name of the folder, which is in that of the file of rollouts."""
IN_FOLDER = "picture_folder"
"""Key of a sample that was read from a file: the folder of its pictures."""
IS_DIGEST = re.compile(r"[0-9a-f]{32}\Z")
"""A digest as a text."""

_MAX_BYTES = 1 << 30
"""Bytes of the arrays of one picture that are read."""
_MAX_ARRAYS = 16
_MAX_PNG_BYTES = 1 << 25
_PNG = b"\x89PNG\r\n\x1a\n"
_STORED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 1
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def as_entries(pictures: Sequence[PlacedPicture]) -> list[dict[str, Any]]:
    """Pictures of a prompt as a sample has them in memory."""
    return [{"start": each.start, "end": each.end, "picture": each.picture} for each in pictures]


def folder_beside(path: str | os.PathLike[str]) -> Path:
    """The folder of the pictures of a file of rollouts."""
    return Path(path).parent / FOLDER


def save_pictures(folder: Path, samples: Iterable[Mapping[str, Any]]) -> None:
    """Write the pictures of samples that are in memory and not in the folder, which is made. Raises `OSError`."""
    for picture, num_features in _pictures_in_memory(samples):
        path = folder / f"{picture.digest.hex()}.npz"
        if path.exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        image = png_of(picture, num_features)
        if image is not None:
            with whole_file(path.with_suffix(".png")) as file:
                file.write(image)
        with whole_file(path) as file:  # the last: others skip a picture that has it
            np.savez(file, **picture.arrays)  # type: ignore[arg-type]  # mypy takes them for `allow_pickle`


def has_pictures(samples: Iterable[Mapping[str, Any]]) -> bool:
    """Whether any of the samples has pictures in memory."""
    return next(_pictures_in_memory(samples), None) is not None


def placed_pictures(sample: Mapping[str, Any], known: dict[str, Picture]) -> list[PlacedPicture]:
    """The pictures of a sample, from memory or its files; `known` keeps those that were read, by digest.

    Raises `RequestError` for a file that is missing or holds anything else.
    """
    found = []
    for each in sample.get("pictures") or ():
        picture = each["picture"]
        if not isinstance(picture, Picture):
            if picture not in known:
                known[picture] = load_picture(_folder_of(sample), picture)
            picture = known[picture]
        found.append(PlacedPicture(each["start"], each["end"], picture))
    return found


def load_picture(folder: str | os.PathLike[str], digest: str) -> Picture:
    """Read the picture with this digest. Nothing in the file is run, and at most 1 GiB of arrays is read.

    Raises `RequestError` for a file that is missing, is no such file, or holds another picture.
    """
    path = Path(folder) / f"{digest}.npz"
    bound = f"a file of a picture, as rollouts write it, in {path.parent}"
    if not IS_DIGEST.match(digest):
        raise RequestError.for_field("picture", digest, "a digest of 32 hexadecimal digits")
    try:
        with zipfile.ZipFile(path) as archive:
            picture = Picture.of(_read_arrays(archive))
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError) as problem:
        raise RequestError.for_field("picture", path.name, bound, f"{problem}.") from problem
    if picture.digest.hex() != digest:
        hint = f"Its arrays are those of {picture.digest.hex()}: it was changed, or renamed."
        raise RequestError.for_field("picture", path.name, bound, hint)
    return picture


def damaged_pictures(samples: Iterable[Mapping[str, Any]], *, most_bytes: int = _MAX_BYTES) -> dict[str, str]:
    """Why files of the pictures that samples and their messages name cannot be used, by digest; the others are right.

    Files of `most_bytes` together are read, the first ones; of others nothing is known.
    """
    found, seen = dict[str, str](), set[str]()
    for sample in samples:
        folder = sample.get(IN_FOLDER)
        for name in (each for each in _pictures_of(sample) if isinstance(each, str) and each not in seen):
            if folder is None:
                break
            seen.add(name)
            path = Path(folder) / f"{name}.npz"
            most_bytes -= path.stat().st_size if path.is_file() else 0
            if most_bytes < 0:
                return found
            try:
                load_picture(path.parent, name)
            except RequestError as problem:
                found[name] = str(problem)
    return found


def png_files(samples: Iterable[Mapping[str, Any]], *, most_bytes: int) -> dict[str, bytes]:
    """PNG files of the pictures of samples and their messages, by digest.

    Left out are those without one, and those that would make more than `most_bytes` together with earlier ones.
    """
    listed = list(samples)
    places = {picture.digest: num_features for picture, num_features in _pictures_in_memory(listed)}
    found, looked_for = dict[str, bytes](), set[str]()
    for sample in listed:
        for picture in _pictures_of(sample):
            name = hex_digest(picture)
            if name in looked_for:
                continue
            looked_for.add(name)
            if isinstance(picture, Picture):
                image = png_of(picture, places[picture.digest])
            else:
                image = _read_png(_folder_of(sample), name)
            if image is not None and len(image) <= most_bytes:
                found[name] = image
                most_bytes -= len(image)
    return found


def named_pictures(sample: Mapping[str, Any]) -> list[str]:
    """Digests of the pictures of a sample and of its messages, in order, each once."""
    return list(dict.fromkeys(map(hex_digest, _pictures_of(sample))))


def hex_digest(picture: Picture | str) -> str:
    """The digest of a picture in memory or in a file, as a text."""
    return picture.digest.hex() if isinstance(picture, Picture) else picture


def _pictures_in_memory(samples: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Picture, int | None]]:
    """Each picture that is in memory once, and how many tokens it takes; None: it is in messages alone."""
    seen: set[bytes] = set()
    for sample in samples:
        placed = [(each["picture"], each["end"] - each["start"]) for each in sample.get("pictures") or ()]
        for picture, num_features in [*placed, *((each, None) for each in _in_messages(sample))]:
            if isinstance(picture, Picture) and picture.digest not in seen:
                seen.add(picture.digest)
                yield picture, num_features


def _pictures_of(sample: Mapping[str, Any]) -> Iterator[Picture | str]:
    """The pictures of a sample and of its messages, in memory or by their digests."""
    yield from (each["picture"] for each in sample.get("pictures") or ())
    for image in _in_messages(sample):
        if isinstance(image, Picture) or isinstance(image, str) and IS_DIGEST.match(image):
            yield image


def _in_messages(sample: Mapping[str, Any]) -> Iterator[Any]:
    """The "image" of each picture part of the messages of an episode."""
    messages = sample.get("messages")
    for message in messages if isinstance(messages, list | tuple) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list | tuple) else ():
            if isinstance(part, Mapping) and part.get("type") == "image":
                yield part.get("image")


def _folder_of(sample: Mapping[str, Any]) -> str:
    folder = sample.get(IN_FOLDER)
    if folder is None:
        hint = "read_jsonl(path) finds them beside the file."
        raise RequestError.for_field(IN_FOLDER, None, "the folder of the pictures that the sample names", hint)
    return str(folder)


def _read_arrays(archive: zipfile.ZipFile) -> dict[str, np.ndarray]:
    entries = archive.infolist()
    if len(entries) > _MAX_ARRAYS or sum(entry.file_size for entry in entries) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_ARRAYS} arrays, or more than {_MAX_BYTES} bytes")
    return {entry.filename.removesuffix(".npy"): _read_array(archive, entry) for entry in entries}


def _read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    if entry.compress_type not in _STORED or entry.flag_bits & _ENCRYPTED:
        raise ValueError(f"{entry.filename} is encrypted, or packed in an unknown way")
    with archive.open(entry) as file:
        shape, dtype = _read_header(file, entry.filename)
        num_bytes = math.prod(shape) * dtype.itemsize
        content = file.read(num_bytes + 1) if 0 <= num_bytes <= entry.file_size else b""
    if len(content) != num_bytes or min(shape, default=0) < 0:
        raise ValueError(f"{entry.filename} has {entry.file_size} bytes, not those of an array of shape {shape}")
    return np.frombuffer(bytearray(content), dtype).reshape(shape)


def _read_header(file: IO[bytes], name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"{name} is of version {version}")
    shape, is_fortran, dtype = _HEADERS[version](file)
    if is_fortran or dtype.kind not in "biuf":
        raise ValueError(f"{name} is no plain array of numbers: {dtype}")
    return shape, dtype


def _read_png(folder: str, digest: str) -> bytes | None:
    path = Path(folder) / f"{digest}.png"
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_PNG_BYTES + 1)
    except OSError:
        return None
    return content if content.startswith(_PNG) and len(content) <= _MAX_PNG_BYTES else None
