"""Places of tokens in the text of a choice, as `logprobs.text_offset` of /v1/completions gives them.

The place of a token is the number of characters before it. A character that is divided among several tokens has one
place. Tokens that add no text, such as one that the tokenizer puts before every prompt, have that of the next token.
"""

from collections.abc import Iterator, Sequence

from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.text.text_stream import REPLACEMENT, TextStream
from rollout_engine.text.tokenizer import TextCodec


class TextOffsets:
    """The places of the tokens of one choice, whose tokens may arrive a few at a time.

    Args:
        codec: None: there is no text, and every token is at its begin.
        params: of the choice.
        prompt_token_ids: the tokens before it.
    """

    def __init__(self, codec: TextCodec | None, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._codec, self._num_chars = codec, 0
        self._stream: TextStream | None = None
        if codec is not None:
            self._stream = codec.new_stream(
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                prompt_token_ids=prompt_token_ids,
            )

    def of_prompt(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """The places of a prompt's tokens in its text, behind which the completion begins."""
        found = [0] * len(token_ids) if self._codec is None else [*_places(self._codec, text, token_ids)]
        self._num_chars = len(text)
        return found

    def of_sample(self, token_ids: Sequence[int]) -> list[int]:
        """The places of the next sampled tokens."""
        found = []
        for token_id in token_ids:
            new = self._stream.push([token_id]) if self._stream is not None else ""
            found.append(self._num_chars + _num_before(self._codec, token_id, new))
            self._num_chars += len(new)
        return found


def _num_before(codec: TextCodec | None, token_id: int, new: str) -> int:
    """Characters of a token's new text that stand for bad bytes of tokens before it."""
    if not new.startswith(REPLACEMENT) or codec is None:
        return 0
    own = codec.decode([token_id])
    return len(new) - len(own) if new.endswith(own) else 0


def _places(codec: TextCodec, text: str, token_ids: Sequence[int]) -> Iterator[int]:
    stream, special, place = codec.new_stream(skip_special_tokens=False), set(codec.hf.all_special_ids), 0
    for token_id in token_ids:
        new = stream.push([token_id])
        yield place + _num_before(codec, token_id, new)
        if text.startswith(new, place):
            place += len(new)
        elif token_id not in special:  # of a tokenizer that rewrites texts, for example in lower case
            place = min(place + len(new), len(text))
