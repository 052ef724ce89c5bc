"""Log-probs of a prompt in vLLM's shape, written as JSON at once: as objects, millions of them would take gigabytes."""

from collections.abc import Iterator

import msgspec
import numpy as np

from rollout_engine.base.outputs import RequestOutput, TokenTexts
from rollout_engine.base.threads import run_in_thread
from rollout_engine.serve.openai.logprobs import values_of
from rollout_engine.serve.served import Served

_LONG_VALUES = 1 << 14
"""Number of log-probs from which they are written on another thread than the event loop's."""
_encode = msgspec.json.Encoder().encode


async def prompt_rows(served: Served, output: RequestOutput) -> msgspec.Raw | None:
    """For each prompt token {token id: {logprob, rank, decoded_token}}, itself first and then the most likely ones.

    null for the first token. None if `output` has no log-probs of its prompt.
    """
    if output.prompt_logprobs is None:
        return None
    top = output.prompt_top_logprobs
    if output.prompt_logprobs.size + (0 if top is None else top[0].size) < _LONG_VALUES:
        return _encode_rows(output, served.token_texts)
    return await run_in_thread(_encode_rows, output, served.token_texts)


def _encode_rows(output: RequestOutput, texts: TokenTexts) -> msgspec.Raw:
    return msgspec.Raw(f"[{','.join(_rows(output, texts))}]".encode())


def _rows(output: RequestOutput, texts: TokenTexts) -> Iterator[str]:
    assert output.prompt_logprobs is not None and output.prompt_ranks is not None
    yield "null"
    ends = _Ends(texts)
    listed_ids, listed_values = output.prompt_top_logprobs or (None, None)
    own = zip(output.prompt_token_ids, _numbers(output.prompt_logprobs), output.prompt_ranks.tolist(), strict=True)
    for position, (token_id, value, rank) in enumerate(own):
        if position == 0:
            continue
        row = f'{{"{token_id}":{{"logprob":{value},"rank":{rank}{ends[token_id]}'
        if listed_ids is not None and listed_values is not None:
            ids, values = listed_ids[position].tolist(), _numbers(listed_values[position])
            row += "".join(
                [
                    f',"{other}":{{"logprob":{number},"rank":{place}{ends[other]}'
                    for place, (other, number) in enumerate(zip(ids, values, strict=True), start=1)
                    if other != token_id
                ]
            )
        yield row + "}"


def _numbers(values: np.ndarray) -> list[str]:
    """Write float32 [n] as numbers of JSON, and NaN as null."""
    return _encode(values_of(values)).decode()[1:-1].split(",")


class _Ends(dict[int, str]):
    """Token id -> its part of a row after the rank."""

    def __init__(self, texts: TokenTexts) -> None:
        super().__init__()
        self._texts = texts

    def __missing__(self, token_id: int) -> str:
        end = f',"decoded_token":{_encode(self._texts[token_id]).decode()}}}'
        self[token_id] = end
        return end
