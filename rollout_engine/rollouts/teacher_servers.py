"""Teachers that are HTTP servers: `rollout-engine serve`, or vLLM's, by POST /inference/v1/generate.

Each row of a rollout is one request: its tokens as a prompt, `prompt_logprob_start`, and for each place the ids to
score (`prompt_logprob_token_ids`, one list for each place). The answer has them as a matrix.
"""

import base64
import http.client
import io
import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

import numpy as np

from rollout_engine.base.errors import ConfigError, RequestError, TeacherError
from rollout_engine.base.token_scores import TokenScores
from rollout_engine.faces.frontend import Frontend
from rollout_engine.rollouts.scored_batch import ScoredBatch
from rollout_engine.text.tokenizer import TextCodec

_GENERATE = "/inference/v1/generate"
_CONNECTIONS = 8
_TIMEOUT = 600.0
"""Seconds that a request may take, unless the teacher has a `timeout`."""
_OURS = "rollout-engine"
_PROBED_TOKENS = 512
"""Tokens of the vocabulary whose texts are sent to compare tokenizers."""


class TeacherServer:
    """A server that scores prompts. Any thread may use it."""

    def __init__(
        self, url: str, *, api_key: str | None, model: str | None, timeout: float | None, same_tokenizer: bool
    ) -> None:
        """`model`: the name that requests give, of the server's model or an adapter; None: the first of its list."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"Teacher({url!r}): must be http://HOST:PORT or https://HOST:PORT.")
        self._url, self._parts = url.rstrip("/"), parts
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout, self._same_tokenizer = timeout or _TIMEOUT, same_tokenizer
        self._model = model
        self._is_ours = False
        self._is_known = False
        self._checked: WeakSet[Frontend] = WeakSet()
        """Students whose tokenizer is known to be the same."""

    def check(self, student: Frontend) -> None:
        """Raise `ConfigError` unless the server has the student's tokens, and `TeacherError` if it does not answer."""
        self._learn()
        if self._same_tokenizer or student in self._checked:
            return
        codec = student.inputs.codec
        if codec is None:
            raise ConfigError(
                "the policy has no tokenizer (skip_tokenizer_init) to compare with the server's. If token ids mean the "
                "same to both, give Teacher(url, same_tokenizer=True)."
            )
        for text in _probes(codec):
            expected = codec.encode(text, add_special_tokens=False)
            try:
                answer = self._ask("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})
                found = answer["tokens"]
            except (RequestError, KeyError) as problem:
                raise ConfigError(
                    f"{self._url} does not tokenize ({problem}), so its tokenizer cannot be compared with the "
                    "policy's. If they are the same, give Teacher(url, same_tokenizer=True)."
                ) from None
            if found != expected:
                place = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), -1)
                raise ConfigError(
                    f"its tokenizer is not the policy's: of one text, token {place} has id "
                    f"{expected[place] if expected else None} here and {found[place] if found else None} there. Give a "
                    "teacher with the policy's vocabulary and special tokens."
                )
        self._checked.add(student)

    @property
    def info(self) -> None:
        """Not known."""

    def score(
        self,
        scored: ScoredBatch,
        prompts: Sequence[list[int]] | None,
        candidates: np.ndarray | None,
        top_k: int,
        temperature: float,
    ) -> TokenScores:
        """Score all completions. Raises `RequestError` for requests that it refuses, else `TeacherError`."""
        self._learn()
        if scored.pictures is not None and any(scored.pictures):
            hint = "Give a teacher that is an engine: Teacher(path)."
            raise RequestError.for_field("pictures", "some", "absent for a teacher that is a server", hint)
        if temperature != 1.0 and not self._is_ours:
            hint = f"{self._url} scores prompts at temperature 1: give Teacher(url, temperature=1.0), or roll out so."
            raise RequestError.for_field("temperature", temperature, "1.0", hint)
        given = [row.prompt for row in scored.rows] if prompts is None else prompts
        completions = [row.completion for row in scored.rows]
        sizes = np.cumsum([len(each) for each in completions])[:-1]
        own = [None] * len(completions) if candidates is None else np.split(candidates, sizes)
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            rows = zip(given, completions, own, strict=True)
            parts = pool.map(lambda row: self._score_row(row[0], row[1], row[2], top_k, temperature), rows)
            empty = TokenScores.empty(None if candidates is None else candidates.shape[1], top_k)
            return TokenScores.join([empty, *parts])

    def shutdown(self) -> None:
        """Do nothing: the server is another program's."""

    def _score_row(
        self, prompt: list[int], completion: list[int], candidates: np.ndarray | None, top_k: int, temperature: float
    ) -> TokenScores:
        asked = [list(row) for row in _distinct_rows(completion, candidates)]
        params: dict[str, Any] = {
            "max_tokens": 1,
            "temperature": temperature,
            "prompt_logprob_token_ids": asked,
            "prompt_logprob_start": len(prompt) - 1,
        }
        if top_k:
            params["prompt_logprobs"] = top_k
        if self._is_ours:
            params["logprobs_mode"] = "tempered"
        body = {"model": self._model, "token_ids": prompt + completion, "sampling_params": params}
        answer = self._ask("POST", _GENERATE, body)
        matrix = self._matrix(answer, (len(completion), len(asked[0])))
        values = [dict(zip(ids, row, strict=True)) for ids, row in zip(asked, matrix.tolist(), strict=True)]
        top = self._top(answer, len(prompt), len(completion), top_k) if top_k else (None, None)
        return TokenScores(
            np.array([row[token] for row, token in zip(values, completion, strict=True)], np.float32),
            None
            if candidates is None
            else np.array(
                [[row[token] for token in ids] for row, ids in zip(values, candidates.tolist(), strict=True)],
                np.float32,
            ).reshape(candidates.shape),
            *top,
        )

    def _matrix(self, answer: dict[str, Any], shape: tuple[int, int]) -> np.ndarray:
        """The scores of an answer, float32 of this shape."""
        try:
            content = base64.b64decode(answer["prompt_token_id_logprobs"], validate=True)
            found: np.ndarray = np.load(io.BytesIO(content), allow_pickle=False)
        except (KeyError, TypeError, ValueError) as problem:
            raise TeacherError(
                f"{self._url}{_GENERATE} gave no prompt_token_id_logprobs ({type(problem).__name__}): it needs a "
                "server that takes one list of prompt_logprob_token_ids for each place, as rollout-engine serve and "
                "newer vLLMs do."
            ) from None
        if found.shape != shape or found.dtype != np.float32:
            raise TeacherError(f"{self._url}: scores are {found.dtype} {found.shape}, and should be float32 {shape}.")
        return found

    def _top(self, answer: dict[str, Any], first: int, num: int, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and log-probs of the most likely tokens, by the rows of `prompt_logprobs`."""
        rows = (answer.get("prompt_logprobs") or [])[first : first + num]
        ids, values = np.full((num, top_k), -1, np.int32), np.full((num, top_k), np.nan, np.float32)
        for place, row in enumerate(rows):
            for token, entry in (row or {}).items():
                if entry["rank"] <= top_k:
                    ids[place, entry["rank"] - 1] = int(token)
                    values[place, entry["rank"] - 1] = math.nan if entry["logprob"] is None else entry["logprob"]
        if len(rows) < num or (ids < 0).any():
            raise TeacherError(f"{self._url}: prompt_logprobs={top_k} gave fewer tokens than that for some place.")
        return ids, values

    def _learn(self) -> None:
        """Ask for the model's name, once."""
        if self._is_known:
            return
        listed = self._ask("GET", "/v1/models", None).get("data") or [{}]
        self._is_ours = listed[0].get("owned_by") == _OURS
        self._model = self._model or listed[0].get("id")
        self._is_known = True

    def _ask(self, method: str, path: str, body: Any) -> dict[str, Any]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=self._timeout)
        try:
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, self._path + path, content, self._headers)
            answer = connection.getresponse()
            text, status = answer.read(), answer.status
        except (OSError, http.client.HTTPException) as problem:
            raise TeacherError(f"{self._url}{path} does not answer: {type(problem).__name__}: {problem}.") from problem
        finally:
            connection.close()
        if status >= 500:
            raise TeacherError(f"{self._url}{path} answered {status}: {text[:500].decode(errors='replace')}")
        if status >= 400:
            shown = text[:500].decode(errors="replace")
            raise RequestError(f"{self._url}{path} answered {status}: {shown}", field="teachers", value=status)
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise TeacherError(f"{self._url}{path} answered with something other than a JSON object.")
        return found


def _distinct_rows(completion: Sequence[int], candidates: np.ndarray | None) -> Iterator[Sequence[int]]:
    """The ids to score at each place: its token and its candidates, each once, as many at every place.

    Some servers refuse an id that is named twice; other ids, the lowest, stand in place of those.
    """
    given = [[]] * len(completion) if candidates is None else candidates.tolist()
    distinct = [dict.fromkeys([token, *ids]) for token, ids in zip(completion, given, strict=True)]
    width = max(map(len, distinct))
    for ids in distinct:
        for other in count():
            if len(ids) >= width:
                break
            ids.setdefault(other)
        yield list(ids)


def _probes(codec: TextCodec) -> Iterator[str]:
    """Texts that another tokenizer would hardly give the same ids: many words of the vocabulary, and added tokens."""
    size = len(codec.hf)
    added = codec.hf.added_tokens_decoder
    step = max(1, size // _PROBED_TOKENS)
    words = (codec.decode([token_id]) for token_id in range(0, size, step) if token_id not in added)
    yield " ".join(word for word in words if word and "\N{REPLACEMENT CHARACTER}" not in word)
    if added:
        yield "".join(added[token_id].content for token_id in sorted(added)[:_PROBED_TOKENS])
