"""The tokenizer as the front end uses it: encode, render a chat, decode in a stream."""

from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rollout_engine.errors import ConfigError, RequestError
from rollout_engine.frontend.text_stream import ByteStream, TextStream, TokenBytes, WindowStream


class TextCodec:
    """Text to ids and back, over a Hugging Face tokenizer (`hf`)."""

    def __init__(self, hf: PreTrainedTokenizerBase) -> None:
        self.hf = hf
        self._special = frozenset(i for i, token in hf.added_tokens_decoder.items() if token.special)
        self._tables = {}
        if hf.is_fast and type(hf.backend_tokenizer.decoder).__name__ == "ByteLevel":
            for skipped in (frozenset[int](), self._special):
                self._tables[skipped] = TokenBytes(hf.backend_tokenizer, skipped)

    @classmethod
    def from_pretrained(cls, name: str) -> "TextCodec":
        """Load from a directory or hub id. Raises `ConfigError`."""
        try:
            hf = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except Exception as problem:  # whatever the loader meets in a broken file
            raise _cannot_load(name, f"{type(problem).__name__}: {problem}") from problem
        if len(hf) <= len(hf.added_tokens_decoder):  # what the loader makes up where the files are missing
            raise _cannot_load(name, "it has no vocabulary; are its files (tokenizer.json) there?")
        return cls(hf)

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens the tokenizer adds by itself. Raises `RequestError`."""
        return self._encode(text, add_special_tokens=True)

    def encode_word(self, word: str) -> list[list[int]]:
        """Ids of a word as a text of its own, and after a space where that differs. Raises `RequestError`."""
        texts = (word, f" {word.lstrip()}")
        plain, spaced = (self._encode(text, add_special_tokens=False, field="bad_words") for text in texts)
        return [plain] if spaced == plain else [plain, spaced]

    def encode_chat(self, messages: list[Any], tools: list[Any] | None) -> tuple[str, list[int]]:
        """(text, ids) of a conversation by the chat template, with the generation prompt. Raises `RequestError`."""
        try:
            text = str(self.hf.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True))
        except Exception as problem:  # a template is a program: it may raise anything
            raise RequestError(
                f"The chat template cannot render these messages: {type(problem).__name__}: {problem}",
                field="messages",
                value=messages,
            ) from problem
        return text, self._encode(text, add_special_tokens=False)

    def new_stream(self, *, skip_special_tokens: bool) -> TextStream:
        """A decoder for one completion."""
        skipped = self._special if skip_special_tokens else frozenset()
        if skipped in self._tables:
            return ByteStream(self._tables[skipped])
        return WindowStream(self._decode, skipped)

    def _encode(self, text: str, *, add_special_tokens: bool, field: str = "prompt") -> list[int]:
        try:
            return list(self.hf.encode(text, add_special_tokens=add_special_tokens, verbose=False))
        except Exception as problem:  # for example a lone surrogate, which is no Unicode text
            bound = f"text the tokenizer can encode ({type(problem).__name__}: {problem})"
            raise RequestError.for_field(field, text, bound) from problem

    def _decode(self, token_ids: list[int]) -> str:
        if self.hf.is_fast:  # the tokenizer itself, without the clean-up that rewrites earlier text
            return str(self.hf.backend_tokenizer.decode(token_ids, skip_special_tokens=False))
        return str(self.hf.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _cannot_load(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"No tokenizer could be loaded from '{name}': {reason}. "
        "Give tokenizer=..., or skip_tokenizer_init=True to work with token ids only."
    )
