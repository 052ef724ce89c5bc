"""Log-probs of given tokens at the places of a prompt, as vLLM's clients ask a teacher for them.

prompt_logprob_token_ids    ids, for every place; or a list of ids for each place
prompt_logprob_start        row i is of prompt token start + i + 1
prompt_token_id_logprobs    the answer: float32 [rows, ids], an .npy file in base64
"""

import base64
import io
from typing import Any, NamedTuple

import numpy as np

from rollout_engine.base.errors import RequestError
from rollout_engine.base.sampling_params import MAX_PROMPT_LOGPROB_VALUES, SamplingParams
from rollout_engine.serve.served import Served

_IDS, _START = "prompt_logprob_token_ids", "prompt_logprob_start"


class PromptScores(NamedTuple):
    """The tokens that a request wants to have scored."""

    candidate_ids: np.ndarray
    """int64 [rows, ids]."""
    start: int

    @classmethod
    def read(cls, given: dict[str, Any], num_tokens: int, vocab_size: int) -> "PromptScores | None":
        """Take these fields out of sampling parameters; `num_tokens`: of the prompt. None: nothing is to be scored.

        Raises `RequestError` for anything else than lists of ids, and for too many of them.
        """
        ids, start = given.pop(_IDS, None), given.pop(_START, None)
        if ids is None:
            if start:
                raise RequestError.for_field(
                    _START, start, f"given with {_IDS}", "prompt_logprobs begin with the prompt."
                )
            return None
        if start is not None and (type(start) is not int or start < 0):
            raise RequestError.for_field(_START, start, "an int of at least 0")
        return cls(_as_rows(ids, max(num_tokens - 1 - (start or 0), 0), vocab_size), start or 0)

    async def compute(self, served: Served, token_ids: list[int], params: SamplingParams, lora: str | None) -> str:
        """Score the prompt: the matrix as the answer has it."""
        first = self.start + 1
        temperature = 1.0 if params.logprobs_mode == "raw" else params.temperature
        pair = [token_ids[:first]], [token_ids[first:]]
        scores = await served.engine.score_candidates(*pair, self.candidate_ids, temperature=temperature, lora=lora)
        assert scores.candidates is not None, "they were asked for"
        file = io.BytesIO()
        np.save(file, scores.candidates, allow_pickle=False)
        return base64.b64encode(file.getvalue()).decode("ascii")


def _as_rows(ids: Any, num_rows: int, vocab_size: int) -> np.ndarray:
    """Ids for every place, or a list of them for each, as int64 [num_rows, ids]."""
    is_flat = isinstance(ids, list) and all(type(each) is int for each in ids)
    rows: Any = [ids] if is_flat else ids
    widths = {len(row) if isinstance(row, list) else -1 for row in rows} if isinstance(rows, list) else {-1}
    bound = f"ids, or a list of as many ids for each of the {num_rows} prompt tokens from prompt_logprob_start + 1 on"
    fits = len(widths) <= 1 and widths.isdisjoint({-1, 0}) and (is_flat or len(rows) == num_rows)
    if not fits or not all(type(each) is int for row in rows for each in row):
        raise RequestError.for_field(_IDS, ids, bound)
    width = max(widths, default=0)
    if width * num_rows > MAX_PROMPT_LOGPROB_VALUES:
        shown = f"{num_rows} x {width} ids"
        raise RequestError.for_field(_IDS, shown, f"at most {MAX_PROMPT_LOGPROB_VALUES} log-probs a prompt")
    wrong = next((each for row in rows for each in row if not 0 <= each < vocab_size), None)
    if wrong is not None:
        raise RequestError.for_field(_IDS, wrong, f"ids in [0, {vocab_size})")
    if is_flat:
        return np.tile(np.array(ids, np.int64), (num_rows, 1))
    return np.array(rows, np.int64).reshape(num_rows, width)
