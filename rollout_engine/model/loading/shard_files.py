"""Names and sizes of the files of a sharded state: one for each rank, or several of a bounded size."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rollout_engine.base.errors import RequestError
from sync.base import Metadata
from sync.manifest import TensorSpec

PATTERN = "model-rank-{rank}-part-{part}.safetensors"
"""The pattern of vLLM's saver, for example."""
_NAME = re.compile(r"[\w.{}-]{1,200}\.safetensors")
_FIELD = re.compile(r"\{(\w*)\}")


class ShardFiles(NamedTuple):
    """How a rank's weights are divided over files."""

    pattern: str = ""
    """Name of a file, with "{rank}" and "{part}" in it; "": the names that `name` makes."""
    max_bytes: int = 0
    """Most bytes of the tensors of a file, unless one tensor has more; 0: all of a rank are in one file."""

    @property
    def are_plain(self) -> bool:
        """Whether each rank has one file, of the usual name."""
        return not self.pattern and not self.max_bytes

    @classmethod
    def of(cls, pattern: str | None, max_size: int | None, verb: str) -> "ShardFiles":
        """The files that a caller of `verb` asks for; None: the usual ones.

        Raises `RequestError`, naming `verb`, for a size below one byte, and a pattern that gives two files one name.
        """
        if max_size is not None and max_size < 1:
            raise _make_refusal(verb, "max_size", max_size, "bytes of a file, at least 1, or None")
        fields = set(_FIELD.findall(pattern or ""))
        needed = {"rank"} if max_size is None else {"rank", "part"}
        is_name = pattern is None or (_NAME.fullmatch(pattern) and not re.search(r"[{}]", _FIELD.sub("", pattern)))
        if not is_name or (pattern is not None and not needed <= fields <= {"rank", "part"}):
            shown = " and ".join(f"{{{each}}}" for each in sorted(needed, reverse=True))
            raise _make_refusal(verb, "pattern", pattern, f"the name of a file with {shown} in it, such as {PATTERN}")
        return cls(pattern or "", max_size or 0)

    def name(self, rank: int, part: int, num_ranks: int) -> str:
        """The file of a part of a rank's weights."""
        if self.pattern:
            return self.pattern.replace("{rank}", str(rank)).replace("{part}", str(part))
        behind = f"-part-{part}" if self.max_bytes else ""
        return f"rank-{rank}-of-{num_ranks}{behind}.safetensors"

    def divide(self, forms: Metadata) -> list[dict[str, tuple[str, tuple[int, ...]]]]:
        """The (dtype, shape) of names by file, in order; one file without tensors if there are none."""
        parts: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
        size = 0
        for name, (dtype, shape) in forms.items():
            num_bytes = TensorSpec(name, tuple(shape), dtype, "").num_bytes
            if self.max_bytes and parts[-1] and size + num_bytes > self.max_bytes:
                parts.append({})
                size = 0
            parts[-1][name] = dtype, tuple(shape)
            size += num_bytes
        return parts

    def found_in(self, directory: Path, num_ranks: int) -> list[list[str]]:
        """The names of the files that each rank has written to a directory."""
        return [list(self._list_written(directory, rank, num_ranks)) for rank in range(num_ranks)]

    def _list_written(self, directory: Path, rank: int, num_ranks: int) -> Iterator[str]:
        part, last = 0, ""
        while (name := self.name(rank, part, num_ranks)) != last and (directory / name).exists():
            yield name
            part, last = part + 1, name


def _make_refusal(verb: str, field: str, value: object, bound: str) -> RequestError:
    return RequestError(f"{verb}: {RequestError.for_field(field, value, bound)}", field=field, value=value, bound=bound)


def check_file_names(files: Sequence[Sequence[str]], num_ranks: int) -> str | None:
    """Why a state's lists of files, one a rank, are not those that a save wrote; None if they may be."""
    names = [name for each in files for name in each]
    if len(files) != num_ranks or not all(files):
        return f"it lists the files of {len(files)} ranks, and has {num_ranks}"
    if len({*names}) < len(names) or any(not _NAME.fullmatch(name) or "{" in name for name in names):
        return "it lists files that no save wrote"
    return None
