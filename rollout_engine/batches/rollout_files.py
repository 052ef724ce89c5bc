"""Reading of files of rollouts, and appending to them: lines of `to_jsonl`, or of `rollout(log_to=...)`."""

import json
import logging
import os
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import Picture
from rollout_engine.batches.picture_files import IN_FOLDER, IS_DIGEST, folder_beside, named_pictures

logger = logging.getLogger("rollout_engine")

SCHEMA = 1
"""Number of the table of `rollout_engine.rollouts.log`; files of a higher one are not read."""
_TokenIds = list[Annotated[int, msgspec.Meta(ge=0)]]


class _Lora(msgspec.Struct):
    """The keys of "lora" that replays read."""

    name: str
    digest: str | None


class _Engine(msgspec.Struct):
    """The keys of "engine" that replays read; lines of older versions have no quantization."""

    model: str
    dtype: str
    fp32_head: bool
    deterministic: bool | str
    logits_processors: list[str]
    made_with: dict[str, Any]
    quantization: str | None = None
    step_trace: str | None = None


class _Placed(msgspec.Struct):
    """A picture of a sample, a `Picture` in memory or the digest of its file."""

    start: Annotated[int, msgspec.Meta(ge=0)]
    end: int
    picture: Any

    @property
    def is_named(self) -> bool:
        is_digest = isinstance(self.picture, str) and IS_DIGEST.match(self.picture) is not None
        return is_digest or isinstance(self.picture, Picture)


class _Rollout(msgspec.Struct):
    """The keys that every reader relies on, and those that replays read, which only logs have."""

    group_id: int
    sample_index: int
    seed: int
    prompt_token_ids: _TokenIds
    response_token_ids: _TokenIds
    log_probs: list[float]
    policy_version: list[int]
    prompt: str | None = None
    response: str | None = None
    reward: float | None = None
    columns: dict[str, Any] | None = None
    kv_min_version: list[int] | None = None
    turns: list[int] | None = None
    forced: list[bool] | None = None
    sampling: dict[str, Any] | None = None
    weights: dict[str, str | None] | None = None
    lora: _Lora | None = None
    engine: _Engine | None = None
    made: tuple[float, float] | None = None
    pictures: list[_Placed] | None = None
    support: list[_TokenIds] | None = None


_NEEDED = {field.name for field in msgspec.structs.fields(_Rollout) if field.required}


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The samples of a file, in its order, as dicts with the keys of `rollout_engine.batches.jsonl`.

    A last line that was cut off, as by a process that was killed, is left out, with a warning. Samples with pictures
    get "picture_folder", the folder of their files. Raises `RequestError` for a file that cannot be read, another line
    that is not a rollout, and a newer schema, with the line's number.
    """
    try:
        with open(Path(path), "rb") as file:
            samples = [_read_line(str(path), number, line) for number, line in enumerate(file, 1)]
    except OSError as problem:
        raise RequestError.for_field("path", str(path), "a file of rollouts", f"{problem}.") from problem
    found = [sample for sample in samples if sample is not None]
    for sample in found:
        if named_pictures(sample):
            sample[IN_FOLDER] = str(folder_beside(path).absolute())
    return found


def end_last_line(file: BinaryIO) -> None:
    """End a last line that was cut off, so that it spoils itself alone. `file` is open for reading and appending."""
    size = file.seek(0, os.SEEK_END)
    if size:
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.write(b"\n")


def append_text(path: str | os.PathLike[str], text: str, *, after_cut: bool = True) -> None:
    """Append whole lines to a file, which is made if it is missing. Raises `OSError`, after which a line may be cut.

    `after_cut`: whether the last line may be one that was cut off.
    """
    is_seekable = os.path.isfile(path) or not os.path.exists(path)
    with open(path, "a+b" if is_seekable else "ab") as file:
        if after_cut and is_seekable:
            end_last_line(file)
        file.write(text.encode())


def complete_lines(content: bytes) -> tuple[list[bytes], bytes]:
    """The lines of a file that grows which are whole, and the rest behind the last of them."""
    *lines, rest = content.split(b"\n")
    return [line for line in lines if line.strip()], rest


def parse_sample(line: bytes) -> dict[str, Any] | None:
    """A line of a file that grows as a sample; None for other lines, and for a sample of a newer schema."""
    try:
        sample = json.loads(line, parse_constant=_not_json)
    except (ValueError, RecursionError):
        return None
    return None if sample_problem(sample) or sample.get("schema", 0) not in range(SCHEMA + 1) else sample


def _read_line(path: str, number: int, line: bytes) -> dict[str, Any] | None:
    """A sample; None for an empty line, and for one that was cut off."""
    line = line.rstrip()
    if not line:
        return None
    try:
        sample: dict[str, Any] = json.loads(line, parse_constant=_not_json)
    except (ValueError, RecursionError) as problem:
        if not line.endswith(b"}") or getattr(problem, "pos", 0) >= len(line.decode(errors="replace")):
            logger.warning("%s: line %d was cut off (%d bytes) and is left out", path, number, len(line))
            return None
        raise RequestError.for_field(f"{path}:{number}", _start(line), "a line of JSON", f"{problem}.") from None
    if reason := sample_problem(sample):
        hint = f"{reason}. Files of rollouts are written by rollout(log_to=...) and to_jsonl."
        raise RequestError.for_field(f"{path}:{number}", _start(line), "a rollout", hint)
    if sample.get("schema", 0) not in range(SCHEMA + 1):
        hint = "A newer rollout-engine wrote it: read it with that one."
        raise RequestError.for_field(f"{path}:{number}: schema", sample["schema"], f"at most {SCHEMA}", hint)
    return sample


def sample_problem(sample: Any) -> str:
    """Why a line is no rollout; empty for one that is."""
    missing = sorted(_NEEDED - (sample.keys() if isinstance(sample, dict) else set()))
    if missing:
        return f"It lacks {missing}"
    try:
        known = msgspec.convert(sample, _Rollout)
    except (msgspec.ValidationError, OverflowError) as problem:
        return str(problem)
    sizes = [len(values) for values in (known.response_token_ids, known.log_probs, known.policy_version)]
    if len(set(sizes)) > 1:
        return f"It has {sizes} tokens, log_probs and versions"
    for name in ("kv_min_version", "turns", "forced", "support"):
        values = getattr(known, name)
        if values is not None and len(values) != sizes[0]:
            return f"It has {sizes[0]} tokens, and {len(values)} {name}"
    ends, num_tokens = [0], len(known.prompt_token_ids) + sizes[0]
    for each in known.pictures or ():
        if not each.is_named or not ends[-1] <= each.start < each.end <= num_tokens:
            return f"Its pictures are not spans of its {num_tokens} tokens, in order, each with a digest"
        ends.append(each.end)
    return ""


def _not_json(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON, which has null")


def _start(line: bytes) -> str:
    return line[:60].decode(errors="replace")
