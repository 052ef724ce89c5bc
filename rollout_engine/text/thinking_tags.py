"""The tags of thinking as a tokenizer spells them: which token ids open it, which close it, and which are forced.

A tag that was given to the tokenizer as a token of its own is that token. Any other text may be spelled in many ways:
"</think>" ends in ".</", "think", ">\\n" as well. Such a tag is recognised by the bytes of its tokens, so that no
spelling of it goes unnoticed: a table, made once, has the effect of each token (`base.thinking.Tag`).
"""

from collections.abc import Iterator, Sequence

from rollout_engine.base.errors import RequestError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.thinking import Tag, Thinking, ends_open
from rollout_engine.text.tokenizer import TextCodec

_MAX_KEPT = 64
"""Tags that are kept: requests of strangers bring others without end."""


class ThinkingTags:
    """Reads budgets of thinking for one tokenizer."""

    def __init__(self, codec: TextCodec | None, vocab_size: int) -> None:
        self._codec, self._vocab_size = codec, vocab_size
        self._known: dict[str, tuple[Tag, list[int]]] = {}
        """Text -> the tag, and the token ids of the text."""

    def are_new(self, budget: object, tags: Sequence[object]) -> bool:
        """Whether a budget has tags that were not read yet, which takes its time."""
        known = all(isinstance(tag, str) and tag in self._known for tag in tags)
        return budget is not None and self._codec is not None and not known

    def check(self, params: SamplingParams) -> None:
        """Raise `RequestError`, naming the field, for a budget whose tags the tokenizer does not have."""
        if (given := params.thinking_budget) is None:
            return
        if self._codec is None:
            bound = "None with skip_tokenizer_init=True"
            raise RequestError.for_field("thinking_budget", given, bound, "Its tags are text.")
        self._read("thinking_start", params.thinking_start)
        self._read("thinking_end", params.thinking_end)

    def budget_of(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> Thinking | None:
        """The budget of one prompt, in token ids; None for params, which were checked, without one."""
        if params.thinking_budget is None:
            return None
        start, _ = self._read("thinking_start", params.thinking_start)
        end, closing = self._read("thinking_end", params.thinking_end)
        is_open = ends_open(start, end, prompt_token_ids)
        return Thinking(params.thinking_budget, is_open, start, end, closing)

    def _read(self, field: str, text: str) -> tuple[Tag, list[int]]:
        found = self._known.get(text)
        if found is None:
            if len(self._known) >= _MAX_KEPT:
                self._known.clear()
            found = self._known[text] = self._make(field, text)
        return found

    def _make(self, field: str, text: str) -> tuple[Tag, list[int]]:
        codec = self._codec
        assert codec is not None, "`check` refuses"
        token_id = codec.find_added(text)
        if token_id is not None and token_id < self._vocab_size:
            return Tag(1, {token_id: [1]}), [token_id]
        token_ids = codec.encode_part(text, field)
        tag = Tag(len(text.encode()), dict(_moves(text.encode(), codec, self._vocab_size)))
        if tag.states(token_ids)[-1:] != [tag.length] or len(tag.states(token_ids)) < len(token_ids):
            hint = f"Its tokens {token_ids} spell {codec.decode(token_ids)!r}."
            raise RequestError.for_field(field, text, "a text that the tokenizer has tokens for", hint)
        return tag, token_ids


def _moves(text: bytes, codec: TextCodec, vocab_size: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the tokens that lead to some other state than 0, with their `Tag.moves`."""
    step = _automaton(text)
    begins = {byte for row in step for byte, state in row.items() if state}
    for token_id in sorted(each for each in codec.hf.get_vocab().values() if each < vocab_size):
        spelled = codec.bytes_of(token_id)
        if not spelled or (spelled[0] not in begins and text[0] not in spelled):
            continue
        first, *others = (_run(step, state, spelled) for state in range(len(text)))
        pairs = [(state, other) for state, other in enumerate(others, 1) if other != first]
        if first or pairs:
            yield token_id, [first, *(number for pair in pairs for number in pair)]


def _automaton(text: bytes) -> list[dict[int, int]]:
    """For each state below the last the next one by byte; others lead to 0 (Knuth, Morris and Pratt)."""
    rows: list[dict[int, int]] = []
    border = 0  # state of the text without its first byte
    for state, byte in enumerate(text):
        row = dict(rows[border]) if state else {}
        if state:
            border = rows[border].get(byte, 0)
        row[byte] = state + 1
        rows.append(row)
    return rows


def _run(step: list[dict[int, int]], state: int, spelled: bytes) -> int:
    """The state behind the bytes of a token; the last one stays, once it was reached."""
    for byte in spelled:
        if state == len(step):
            break
        state = step[state].get(byte, 0)
    return state
