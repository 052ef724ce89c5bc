"""Drafts in a file: `save_drafts` and `load_drafts` of every face, and the format that both use.

    rollout-engine drafts 1\\n                       magic and version
    {"vocab_size": .., "tokenizer": .., ...}\\n     `_Header` as JSON
    prompt_keys   uint8  [P, 16]                   the arrays of `KeptSamples`, little-endian, end to end
    num_samples   int64  [P]
    lengths       int64  [S]
    token_ids     uint32 [T]

The file is on the caller's machine, wherever the engine is, and holds tokens as they are: reading it reveals the
samples. It is written under another name next to `path` and renamed once it is whole.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec
import numpy as np

from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.base.kept_samples import KeptSamples
from rollout_engine.base.whole_files import whole_file
from rollout_engine.engine.client import EngineClient
from rollout_engine.engine.verbs import VERBS
from rollout_engine.text.tokenizer import TextCodec
from sync.digests import Digest
from sync.own_files import open_regular

VERSION = 1
"""The version of the format that is written; older versions are read."""
_MAGIC = b"rollout-engine drafts "
_MAX_LINE_BYTES = 1 << 12
_PIECE_BYTES = 1 << 20
_A_FILE = "a file that save_drafts has written"
_GO_ON = "Start without it (drafts change no result), and have save_drafts write another one."
_DTYPES = ("<u1", "<i8", "<i8", "<u4")
"""Types of the four arrays of `KeptSamples`, in the order of its fields."""


class HasDrafts(Protocol):
    """A front end, as drafts see it."""

    @property
    def client(self) -> EngineClient: ...
    @property
    def codec(self) -> TextCodec | None: ...


class _Header(msgspec.Struct, frozen=True):
    vocab_size: int
    tokenizer: str
    """`_vocabulary_digest`; "" if the engine had no tokenizer."""
    num_prompts: int
    num_samples: int
    num_tokens: int
    digest: str
    """`sync.digests` of the arrays end to end."""

    def __post_init__(self) -> None:
        if min(self.num_prompts, self.num_samples, self.num_tokens) < 0:
            raise ValueError("counts must be 0 or more")

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Elements of each array."""
        return self.num_prompts * 16, self.num_prompts, self.num_samples, self.num_tokens


def save_drafts(frontend: HasDrafts, path: str | os.PathLike[str], *, timeout: float | None = None) -> int:
    """Write the finished samples that the engine drafts from to a file; returns their number.

    An existing file is replaced atomically. Of a fleet the samples of all replicas are written.

    Raises `RequestError` if the file cannot be written; an old file then remains. `ConfigError` if the
    engine keeps no samples; `CallTimeoutError` after `timeout` seconds of waiting for other work.
    """
    _require_kept(frontend, "save_drafts")
    target = _as_path("save_drafts", path)
    samples: KeptSamples = _call(frontend, "get_kept_samples", timeout=timeout)
    with _os_errors("save_drafts", target, "a file that can be written"):
        with whole_file(target) as file:
            _write(file, samples, frontend)
    return len(samples.lengths)


def load_drafts(frontend: HasDrafts, path: str | os.PathLike[str], *, timeout: float | None = None) -> int:
    """Have the engine draft from the samples that `save_drafts` has written; returns their number.

    They count as its newest. Of more tokens than `SpeculationConfig.max_rollout_tokens` the prompts that were seen last
    are taken. Of a fleet every replica gets them, but not one that starts later.

    Raises `RequestError`, nothing changed, for a file that is missing, of another kind, damaged, written by a newer
    version, or of another vocabulary; `ConfigError` if the engine keeps no samples; `CallTimeoutError` after
    `timeout` seconds of waiting for other work.
    """
    max_tokens = _require_kept(frontend, "load_drafts")
    source = _as_path("load_drafts", path)
    with _os_errors("load_drafts", source, _A_FILE), os.fdopen(open_regular(source), "rb") as file:
        try:
            samples = _read(file, frontend, max_tokens)
        except ValueError as problem:
            raise _make_refusal("load_drafts", source, _A_FILE, f"{problem} {_GO_ON}") from problem
    _call(frontend, "add_kept_samples", samples=samples, timeout=timeout)
    return len(samples.lengths)


def _require_kept(frontend: HasDrafts, verb: str) -> int:
    """Most tokens of samples that the engine keeps. Raises `ConfigError` if it keeps none."""
    info = frontend.client.info
    speculation = info.config.speculates
    if speculation is None:
        problem, advice = f"speculation={info.config.speculation!r}", "Make it with speculation='auto'."
    elif not info.step_seconds:
        problem, advice = "drafted tokens would change this model's log-probs", "Its log says more."
    elif "rollouts" not in speculation.sources or not speculation.max_rollout_tokens:
        problem, advice = f"speculation={speculation!r}", "Drafts of earlier samples need the source 'rollouts'."
    else:
        return speculation.max_rollout_tokens
    raise ConfigError(f"{verb}: this engine keeps no samples to draft from: {problem}. {advice}")


def _write(file: BinaryIO, samples: KeptSamples, frontend: HasDrafts) -> None:
    arrays = (samples.prompt_keys, samples.num_samples, samples.lengths, samples.token_ids)
    contents = [_bytes_of(np.ascontiguousarray(each, kind)) for each, kind in zip(arrays, _DTYPES, strict=True)]
    digest = Digest()
    for content in contents:
        digest.update(content)
    header = _Header(
        frontend.client.info.vocab_size,
        _vocabulary_digest(frontend.codec),
        len(samples.num_samples),
        len(samples.lengths),
        len(samples.token_ids),
        digest.hexdigest(),
    )
    file.write(b"%s%d\n%s\n" % (_MAGIC, VERSION, msgspec.json.encode(header)))
    for content in contents:
        file.write(content)


def _read(file: BinaryIO, frontend: HasDrafts, max_tokens: int) -> KeptSamples:
    """The samples in a file, of the prompts seen last. Raises `ValueError`."""
    header = _read_header(file)
    _check_vocabulary(header, frontend)
    num_bytes = sum(np.dtype(kind).itemsize * size for kind, size in zip(_DTYPES, header.sizes, strict=True))
    missing = num_bytes - (os.fstat(file.fileno()).st_size - file.tell())
    if missing:
        raise ValueError(f"It is {abs(missing)} bytes too {'short' if missing > 0 else 'long'}: it was cut or changed.")
    digest = Digest()
    keys, num_samples, lengths = (
        _read_array(file, kind, size, digest) for kind, size in zip(_DTYPES[:3], header.sizes[:3], strict=True)
    )
    first_prompt = first_sample = first_token = 0
    if header.num_tokens > max_tokens:
        first_prompt, first_sample, first_token = _first_that_fit(num_samples, lengths, max_tokens)
    _read_over(file, 4 * first_token, digest)
    token_ids = _read_array(file, _DTYPES[3], header.num_tokens - first_token, digest)
    if digest.hexdigest() != header.digest:
        raise ValueError("Its digest is not that of its content: it was changed or damaged.")
    return KeptSamples(
        keys.reshape(-1, 16)[first_prompt:], num_samples[first_prompt:], lengths[first_sample:], token_ids
    )


def _read_header(file: BinaryIO) -> _Header:
    magic = file.readline(_MAX_LINE_BYTES)
    version = magic.removeprefix(_MAGIC).strip()
    if not magic.startswith(_MAGIC) or not version.isdigit():
        raise ValueError("It is a file of another kind.")
    if int(version) > VERSION:
        raise ValueError(f"It has version {int(version)} of the format, and this release reads up to {VERSION}.")
    try:
        return msgspec.json.decode(file.readline(_MAX_LINE_BYTES), type=_Header)
    except (ValueError, msgspec.MsgspecError) as problem:
        raise ValueError(f"Its header was cut or changed ({problem}).") from None


def _check_vocabulary(header: _Header, frontend: HasDrafts) -> None:
    vocab_size, tokenizer = frontend.client.info.vocab_size, _vocabulary_digest(frontend.codec)
    if header.vocab_size != vocab_size:
        raise ValueError(f"Its samples are of a model with {header.vocab_size} tokens; this one has {vocab_size}.")
    if header.tokenizer and tokenizer and header.tokenizer != tokenizer:
        raise ValueError("Its samples were made with another tokenizer, whose ids mean other tokens.")


def _first_that_fit(num_samples: np.ndarray, lengths: np.ndarray, max_tokens: int) -> tuple[int, int, int]:
    """The first prompt, sample and token from which on no more than `max_tokens` follow, of whole prompts."""
    sample_starts = np.concatenate([[0], np.cumsum(num_samples)])
    token_starts = np.concatenate([[0], np.cumsum(lengths)])
    if sample_starts[-1] != len(lengths) or (num_samples < 1).any() or (lengths < 1).any():
        raise ValueError("Its counts do not fit each other.")
    starts = token_starts[sample_starts]
    prompt = int(np.searchsorted(starts, starts[-1] - max_tokens))
    return prompt, int(sample_starts[prompt]), int(starts[prompt])


def _read_array(file: BinaryIO, kind: str, size: int, digest: Digest) -> np.ndarray:
    array = np.empty(size, kind)
    content = _bytes_of(array)
    if file.readinto(content) != len(content):  # type: ignore[attr-defined]
        raise ValueError("It ended while it was read.")
    digest.update(content)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _read_over(file: BinaryIO, num_bytes: int, digest: Digest) -> None:
    """Read bytes for the digest alone."""
    while num_bytes:
        piece = file.read(min(num_bytes, _PIECE_BYTES))
        if not piece:
            raise ValueError("It ended while it was read.")
        digest.update(piece)
        num_bytes -= len(piece)


def _vocabulary_digest(codec: TextCodec | None) -> str:
    """blake2b-128 of a tokenizer's tokens and their ids; "" without one."""
    if codec is None:
        return ""
    entries = (f"{token}\0{token_id}\0" for token, token_id in sorted(codec.hf.get_vocab().items()))
    return blake2b("".join(entries).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _call(frontend: HasDrafts, name: str, **arguments: Any) -> Any:
    return frontend.client.call(name, arguments).wait(VERBS[name], arguments)


def _as_path(verb: str, path: str | os.PathLike[str]) -> Path:
    try:
        return Path(path)
    except TypeError:
        raise _make_refusal(verb, path, "the path of a file") from None


@contextmanager
def _os_errors(verb: str, path: Path, bound: str) -> Iterator[None]:
    """Re-raise errors of the system as `RequestError`."""
    try:
        yield
    except (OSError, ValueError) as problem:  # ValueError: a path with a NUL in it
        if isinstance(problem, RequestError):
            raise
        raise _make_refusal(verb, path, bound, f"{type(problem).__name__}: {problem}.") from problem


def _make_refusal(verb: str, path: object, bound: str, hint: str = "") -> RequestError:
    shown = str(path) if isinstance(path, Path) else path
    error = RequestError.for_field("path", shown, bound, hint)
    return RequestError(f"{verb}: {error}", field="path", value=shown, bound=bound)
