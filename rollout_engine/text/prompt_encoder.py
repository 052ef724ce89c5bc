"""Token ids of prompts of any kind, and their pictures at their places."""

from typing import Any, NamedTuple

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import PlacedPicture, shift_pictures
from rollout_engine.base.sampling_params import SamplingParams, TruncationSide
from rollout_engine.text.conversations import CHAT_KEYS
from rollout_engine.text.picture_prompts import PicturePrompts, images_in
from rollout_engine.text.prompts import as_token_ids, truncated
from rollout_engine.text.tokenizer import TextCodec


class EncodedPrompt(NamedTuple):
    """A prompt as token ids."""

    text: str | None
    """Its text, if it had one; a picture has one placeholder in it."""
    token_ids: list[int]
    pictures: list[PlacedPicture]


class PromptEncoder:
    """Encodes prompts for one model.

    Args:
        codec: the tokenizer; None with `skip_tokenizer_init`.
        pictures: reads the pictures of prompts.
    """

    def __init__(
        self, codec: TextCodec | None, pictures: PicturePrompts, *, max_model_len: int, vocab_size: int
    ) -> None:
        self._codec, self._pictures = codec, pictures
        self._max_model_len, self._vocab_size = max_model_len, vocab_size

    def encode(self, fields: dict[str, Any], *, truncates: bool) -> EncodedPrompt:
        """Encode a prompt (`as_fields`), of any length, and read its pictures. Raises `RequestError`.

        Unless it is truncated, a long text that is too long is refused early.
        """
        if "prompt_token_ids" in fields:
            return self._encode_ids(fields)
        kind, most = "prompt" if "prompt" in fields else "messages", None if truncates else self._max_model_len
        if self._codec is None:
            bound = "token ids: the engine has no tokenizer (skip_tokenizer_init=True)"
            raise RequestError.for_field(kind, fields[kind], bound)
        read = self._pictures.read_all(images_in(fields))
        text, adds = self._text_of(self._codec, fields)
        if not read:
            self._pictures.check_text(text, fields)
        expanded = self._pictures.expand_text(text, read, fields) if read else text
        token_ids = self._codec.encode(expanded, add_special_tokens=adds, most=most)
        token_ids = as_token_ids(token_ids, f"{kind} as token ids", self._vocab_size)
        return EncodedPrompt(text, token_ids, self._pictures.place(token_ids, read, kind) if read else [])

    def truncate(self, prompt: EncodedPrompt, params: SamplingParams) -> EncodedPrompt:
        """Return the part of a prompt that `truncate_prompt_tokens` keeps. Raises `RequestError` for half a picture."""
        most = params.truncate_prompt_tokens
        if most == -1:
            most = self._max_model_len - max(params.max_tokens or 1, params.min_tokens)
            if most < 1:
                bound = f"below max_model_len={self._max_model_len}, to leave room for the prompt"
                raise RequestError.for_field("max_tokens", params.max_tokens, bound)
        kept = truncated(prompt.token_ids, most, params.truncation_side)
        if not prompt.pictures:
            return EncodedPrompt(prompt.text, kept, [])
        pictures = _kept_pictures(prompt.pictures, len(prompt.token_ids), len(kept), params.truncation_side)
        return EncodedPrompt(prompt.text, kept, pictures)

    def _text_of(self, codec: TextCodec, fields: dict[str, Any]) -> tuple[str, bool]:
        """The text of a prompt, and whether the tokenizer adds special tokens to it."""
        if "prompt" in fields:
            adds = fields.get("add_special_tokens")
            return fields["prompt"], adds is None or adds
        options = {key: fields[key] for key in CHAT_KEYS if key in fields}
        return codec.chat_prompt(fields["messages"], **options), False

    def _encode_ids(self, fields: dict[str, Any]) -> EncodedPrompt:
        token_ids = as_token_ids(fields["prompt_token_ids"], "prompt_token_ids", self._vocab_size)
        if "pictures" in fields:
            return EncodedPrompt(None, token_ids, self._pictures.check_placed(fields["pictures"], token_ids))
        read = self._pictures.read_all(images_in(fields))
        if not read:
            self._pictures.check_ids(token_ids)
            return EncodedPrompt(None, token_ids, [])
        token_ids, placed = self._pictures.expand_ids(token_ids, read)
        return EncodedPrompt(None, token_ids, placed)


def _kept_pictures(
    pictures: list[PlacedPicture], num_tokens: int, num_kept: int, side: TruncationSide
) -> list[PlacedPicture]:
    """The pictures of a prompt that is cut to its first or last `num_kept` tokens."""
    first = num_tokens - num_kept if side == "left" else 0
    for index, each in enumerate(pictures):
        if each.start < first < each.end or each.start < first + num_kept < each.end:
            bound = f"a length that keeps all of picture {index}, tokens [{each.start}, {each.end}), or nothing of it"
            raise RequestError.for_field("truncate_prompt_tokens", num_kept, bound)
    kept = [each for each in pictures if first <= each.start and each.end <= first + num_kept]
    return shift_pictures(kept, -first)
