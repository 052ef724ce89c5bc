"""Post-mortem files: the last steps, calls and versions of a core that died, as JSON lines. Both ends in this file.

    header   format, reason, traceback, sizes of the core
    live     a request that was unfinished before the first entry
    add      a request arrived        call   a method of the core, or a verb of the engine
    step     a step was scheduled     end    a step was over: the sequences that ended, or its error

Prompts are not in it: each KV block of tokens is one number, equal for equal beginnings with equal pictures: all that
the prefix cache sees of them, so that a replay needs no picture. Next to it may be the stacks that `faulthandler` wrote
(`.stacks`).
"""

import faulthandler
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.messages import EngineCoreRequest
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.picture_keys import keyed_prompt
from rollout_engine.core.recorder import plain_arguments
from rollout_engine.engine.history import Added, Called, History, Live, Scheduled, Stepped
from sync.own_files import cache_directory, read_regular

FORMAT = 1
STACKS_SUFFIX = ".stacks"
"""Ends the names of files with the stacks of a crash."""
_STACKS = "stacks"
_STACKS_BEGIN = ("Fatal Python error", "Current thread", "Thread 0x")
"""Words with which `faulthandler` begins."""
_MOST_BYTES = 1 << 28
"""Longest file that is read."""
_NUM_KEPT = 16
"""Files that are kept, the last ones."""


class Request(msgspec.Struct, kw_only=True):
    """A request of n sequences, or one live sequence of it."""

    id: int
    """Its first sequence."""
    n: int
    blocks: list[int]
    """A number for each `block_size` tokens of the prompt."""
    num_tokens: int
    max_tokens: int
    """Tokens that it may still gain."""
    priority: int
    salt: str
    """Digest of the cache salt."""
    scores_prompt: bool
    pools: Literal["", "last", "all"] = ""
    """Which hidden states a request pools; "": it samples."""


class Header(msgspec.Struct, tag="header", kw_only=True):
    """The first line of a file."""

    format: int
    pid: int
    time: float
    """Seconds since the epoch."""
    reason: str
    traceback: str
    config: dict[str, Any]
    """`CoreConfig`."""
    policy_version: int
    """Before the first entry."""
    is_whole: bool
    """The entries begin with the core: nothing precedes them."""


class LiveLine(msgspec.Struct, tag="live"):
    """A request that was unfinished before the first entry."""

    request: Request


class AddLine(msgspec.Struct, tag="add"):
    """A request arrived. `at`: seconds since the first entry, as in all lines."""

    at: float
    request: Request


class CallLine(msgspec.Struct, tag="call"):
    """A call."""

    at: float
    name: str
    arguments: list[Any]
    is_verb: bool


class StepLine(msgspec.Struct, tag="step"):
    """A step was scheduled."""

    at: float
    step: int
    policy_version: int
    rows: list[tuple[int, int, int]]
    """(sequence id, tokens computed before, tokens scheduled)."""
    samples: list[int]
    """Sequences that gain a token."""


class EndLine(msgspec.Struct, tag="end"):
    """A step was over."""

    at: float
    seconds: float
    ended: list[tuple[int, str]]
    """(sequence id, finish reason)."""
    problem: str


Line = Header | LiveLine | AddLine | CallLine | StepLine | EndLine


def write_post_mortem(history: History, reason: str, traceback: str = "") -> Path | None:
    """Write the entries of `history`. Returns the file, or None if it cannot be written."""
    path = _folder() / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            for line in _lines(history, reason, traceback):
                file.write(msgspec.json.encode(line) + b"\n")
        _forget_old(path.parent)
    except OSError:
        return None
    return path


def read_post_mortem(path: Path) -> list[Line]:
    """Read a file. Raises `RequestError` for another kind of file."""
    decoder = msgspec.json.Decoder(Line)
    try:
        lines: list[Line] = [decoder.decode(line) for line in read_regular(path, _MOST_BYTES).splitlines()]
    except (OSError, msgspec.MsgspecError) as problem:
        raise RequestError(f"{path} is no post-mortem file: {problem}.", field="file", value=str(path)) from None
    if not lines or not isinstance(lines[0], Header) or lines[0].format != FORMAT:
        raise RequestError(f"{path} is no post-mortem file of format {FORMAT}.", field="file", value=str(path))
    return lines


def read_stacks(path: Path) -> str:
    """Read the stacks that a crash has left. Raises `RequestError` for another kind of file."""
    try:
        text = read_regular(path, _MOST_BYTES).decode(errors="replace").strip()
    except OSError as problem:
        raise RequestError(f"{path} cannot be read: {problem}.", field="file", value=str(path)) from None
    if not text.startswith(_STACKS_BEGIN):
        raise RequestError(f"{path} does not begin as stacks of a crash do.", field="file", value=str(path))
    return text


def catch_crashes(directory: str) -> None:
    """Have all Python stacks written to a file in `directory` when native code crashes, or at SIGABRT."""
    file = os.open(Path(directory) / _STACKS, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    faulthandler.enable(file)  # for the life of the process: the descriptor is not closed


def keep_stacks(directory: str, pid: int) -> Path | None:
    """Move the stacks that the core `pid` left in its directory next to the post-mortem files. None: it left none."""
    source, path = Path(directory) / _STACKS, _folder() / f"{time.strftime('%Y%m%d-%H%M%S')}-{pid}{STACKS_SUFFIX}"
    try:
        if not source.stat().st_size:
            return None
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.move(source, path)
        _forget_old(path.parent)
    except OSError:
        return None
    return path


def _folder() -> Path:
    return cache_directory("post-mortems")


def _forget_old(folder: Path) -> None:
    for path in sorted(folder.iterdir())[: -2 * _NUM_KEPT]:
        path.unlink(missing_ok=True)


def _lines(history: History, reason: str, traceback: str) -> Iterator[Line]:
    first = history.generations[0]
    entries = [entry for generation in history.generations for entry in generation.entries]
    unended = history.unended
    if unended is not None:
        entries.append(unended)
    yield Header(
        format=FORMAT,
        pid=os.getpid(),
        time=time.time(),
        reason=reason,
        traceback=traceback,
        config=msgspec.structs.asdict(history.config),
        policy_version=first.policy_version,
        is_whole=first.is_first,
    )
    for live in first.live:
        yield from map(LiveLine, _live_requests(live, history.config))
    start = _time_of(entries[0]) if entries else 0.0
    last = StepLine(0.0, -1, 0, [], [])
    for entry in entries:
        at = round(_time_of(entry) - start, 6)
        match entry:
            case Added(_, request):
                yield AddLine(at, _request(request, _room(request), history.config))
            case Called(_, name, arguments, is_verb, options):
                given = [] if is_verb else plain_arguments(name, arguments, options)
                yield CallLine(at, name, given, is_verb)
            case _:
                stepped = Stepped(*entry)
                for scheduled in stepped.scheduled:
                    yield (last := _step_line(at, scheduled, last))
                if entry is not unended:
                    ended: list[tuple[int, str]] = [(end.sequence_id, end.finish_reason) for end in stepped.ended]
                    yield EndLine(at, round(stepped.at - stepped.begun, 6), ended, stepped.problem)


def _time_of(entry: Any) -> float:
    """When it arrived or began."""
    return float(entry[0])


def _step_line(at: float, scheduled: Scheduled | None, last: StepLine) -> StepLine:
    """The line of a step; `last`: that of the step before."""
    if scheduled is None:
        rows = [(sequence_id, start + count, 1) for sequence_id, start, count in last.rows]
        return StepLine(at, last.step + 1, last.policy_version, rows, last.samples)
    values = iter(scheduled.rows)
    rows = list(zip(values, values, values, strict=True))
    return StepLine(at, scheduled.step, scheduled.policy_version, rows, list(scheduled.samples))


def _live_requests(live: Live, config: CoreConfig) -> Iterator[Request]:
    source = live.request
    if not live.is_forked:
        yield _request(source, _room(source), config)
        return
    for sequence_id, num_tokens, max_num_tokens in live.sequences:
        one = _request(source, max_num_tokens - num_tokens, config)
        yield msgspec.structs.replace(one, id=sequence_id, n=1, num_tokens=num_tokens, scores_prompt=False)


def _room(request: EngineCoreRequest) -> int:
    """Tokens that a sample of a new request may still get."""
    return request.max_tokens - len(request.output_token_ids)


def _request(source: EngineCoreRequest, max_tokens: int, config: CoreConfig) -> Request:
    token_ids = _prompt_keys(source, config) + source.output_token_ids
    return Request(
        id=source.first_sequence_id,
        n=source.params.n,
        blocks=_blocks(token_ids, config.block_size),
        num_tokens=len(token_ids),
        max_tokens=max_tokens,
        priority=source.priority,
        salt=_space(source),
        scores_prompt=source.params.prompt_logprobs is not None or source.params.return_hidden_states == "all",
        pools="" if source.pooling is None else "all" if config.pools_beyond_last(source.pooling) else "last",
    )


def _prompt_keys(source: EngineCoreRequest, config: CoreConfig) -> list[int]:
    """A number for each token of the prompt, made of a picture's digest if it stands for the picture."""
    if not source.pictures or config.pictures is None:
        return source.prompt_token_ids
    return keyed_prompt(source, config.pictures.image_token_id, lambda identity: 1 << 128 | int.from_bytes(identity))


def _space(source: EngineCoreRequest) -> str:
    """A salt for those that it shares KV with; "" without one."""
    salt = _digest(source.cache_salt.encode()).hexdigest() if source.cache_salt else ""
    return f"{salt} with routed experts" if source.params.return_routed_experts else salt


def _blocks(token_ids: list[int], block_size: int) -> list[int]:
    """A number for each block: a digest of it and all before it."""
    digest, numbers = _digest(), []
    for start in range(0, len(token_ids), block_size):
        digest.update(repr(token_ids[start : start + block_size]).encode())
        numbers.append(int.from_bytes(digest.digest()[:4], "big"))
    return numbers


def _digest(content: bytes = b"") -> Any:
    return hashlib.blake2b(content, digest_size=8)
