"""Wraps a Hugging Face tokenizer: encodes text, renders chats, decodes in a stream."""

import logging
import re
import threading
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.base.locations import find_directory
from rollout_engine.text.chat_rendering import ChatRenderer, check_template
from rollout_engine.text.long_texts import LONG_CHARS, LongTexts
from rollout_engine.text.processor_template import processor_template
from rollout_engine.text.shown_tools import first_unshown, refuse_unshown
from rollout_engine.text.text_stream import ByteStream, TextStream, TokenBytes, WindowStream

logger = logging.getLogger("rollout_engine")

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
"""A token of one byte, of tokenizers that spell characters without a token of their own by bytes."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""A space in the tokens of SentencePiece."""

_MAX_WARNINGS = 256
"""Different warnings that one tokenizer logs: requests of strangers bring names without end."""


class TextCodec:
    """Turns text into ids and ids into text with a Hugging Face tokenizer (`hf`)."""

    def __init__(self, hf: PreTrainedTokenizerBase) -> None:
        self.hf = hf
        added = hf.added_tokens_decoder
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._spelled = re.compile("|".join(re.escape(self._added[token_id]) for token_id in self._special))
        self._warned: set[str] = set()
        self._chats = ChatRenderer(hf, self.warn_once)
        self._backend = _backend(hf)
        self._long_texts: LongTexts | None = None
        self._encoding = threading.Lock()
        """Held while `hf` encodes: it sets its own truncation and padding, for all threads."""
        self._tables = {}
        if hf.is_fast and type(hf.backend_tokenizer.decoder).__name__ == "ByteLevel":
            for skipped in (frozenset[int](), self._special):
                self._tables[skipped] = TokenBytes(hf.backend_tokenizer, skipped)

    @classmethod
    def from_config(cls, config: EngineConfig, directory: Path | None = None) -> "TextCodec | None":
        """Load an engine's tokenizer; None with `skip_tokenizer_init`. Raises `ConfigError`.

        `directory`: the result of `tokenizer_directory`; None: look for it.
        """
        if config.skip_tokenizer_init:
            return None
        codec = cls.from_pretrained(*_locate_tokenizer(config), directory)
        if config.chat_template is not None:
            codec.hf.chat_template = config.chat_template
            check_template(codec.hf)
        return codec

    @classmethod
    def from_pretrained(cls, name: str, field: str = "tokenizer", directory: Path | None = None) -> "TextCodec":
        """Load from a directory or hub id. Raises `ConfigError`; `field` is the option that gave `name`.

        `directory`: the directory of the files of `name`, if known.
        """
        directory = directory or find_directory(name, weights=False, field=field)
        try:  # the whole directory is here: transformers would ask the hub for each file, over and over
            hf = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        except Exception as problem:  # a broken file may raise anything
            raise _cannot_load(name, f"{type(problem).__name__}: {problem}".removesuffix(".")) from problem
        hf.name_or_path = name
        if hf.chat_template is None:
            hf.chat_template = processor_template(directory)
        if len(hf) <= len(hf.added_tokens_decoder):  # the loader returns an empty one if the files are missing
            raise _cannot_load(name, "it has no vocabulary; are its files (tokenizer.json) there?")
        return cls(hf)

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Return the ids of a prompt, with the special tokens that the tokenizer adds. Raises `RequestError`.

        `most`: the longest sequence. A long text with more tokens is refused, if possible before it is encoded.
        """
        token_ids = self._encode(text, add_special_tokens=add_special_tokens, most=most)
        first = self.hf.bos_token_id
        if first is not None and token_ids[:2] == [first, first]:
            self.warn_once(
                f"A prompt's text begins with {self.hf.bos_token!r}, which the tokenizer adds by itself: it is there "
                'twice. Give {"prompt": text, "add_special_tokens": False}, or the conversation itself.'
            )
        return token_ids

    def is_cut_out(self, token_id: int) -> bool:
        """Whether this is a token that is cut out of the text as it is, before the rest is divided into tokens."""
        token = self.hf.added_tokens_decoder.get(token_id)
        return token is not None and not (token.lstrip or token.normalized or token.single_word)

    def without_end(self, token_ids: Sequence[int]) -> list[int]:
        """Return the ids of an answer without the special tokens that end it."""
        end = len(token_ids)
        while end and token_ids[end - 1] in self._special:
            end -= 1
        return list(token_ids[:end])

    @cached_property
    def special_texts(self) -> dict[int, str]:
        """The texts of the special tokens, which decoding can leave out, by their ids."""
        return {token_id: self._added[token_id] for token_id in self._special}

    def has_template(self, name: str) -> bool:
        """Whether the tokenizer has a chat template of this name."""
        return isinstance(self.hf.chat_template, dict) and name in self.hf.chat_template

    def warn_once(self, text: str) -> None:
        """Log a warning, once for each text."""
        if text not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(text)
            logger.warning("%s", text)

    def encode_word(self, word: str) -> list[list[int]]:
        """Return the ids of a word alone, and after a space if those differ. Raises `RequestError`."""
        texts = (word, f" {word.lstrip()}")
        plain, spaced = (self._encode(text, add_special_tokens=False, field="bad_words") for text in texts)
        return [plain] if spaced == plain else [plain, spaced]

    def encode_part(self, text: str, field: str) -> list[int]:
        """Return the ids of a part of an answer. Raises `RequestError` naming the field that gave it."""
        return self._encode(text, add_special_tokens=False, field=field)

    def find_added(self, text: str) -> int | None:
        """The token of this text that the tokenizer was given in addition to its vocabulary; None if there is none."""
        return next((token_id for token_id, content in self._added.items() if content == text), None)

    def chat_prompt(self, messages: list[dict[str, Any]], tools: list[Any] | None = None, **options: Any) -> str:
        """Render a conversation as the text of a prompt; options as in `ChatOptions`.

        Raises `RequestError`, also for tools that the prompt does not show.
        """
        text = self.render_chat(messages, tools, **options)
        self.require_shown_tools(text, messages, tools, **options)
        return text

    def render_chat(self, messages: list[dict[str, Any]], tools: list[Any] | None = None, **options: Any) -> str:
        """Render messages that `as_messages` returned as text; options as in `ChatOptions`. Raises `RequestError`."""
        return self._chats.render(messages, tools, **options)

    def shows_tools(self, messages: list[dict[str, Any]], tools: list[Any] | None = None, **options: Any) -> bool:
        """Whether the prompt of a conversation shows its tools. Raises `RequestError`."""
        text = self.render_chat(messages, tools, **options)
        return self._unshown(text, messages, tools, **options) is None

    def require_shown_tools(
        self, text: str, messages: list[dict[str, Any]], tools: list[Any] | None = None, **options: Any
    ) -> None:
        """Raise `RequestError` for tools that `text`, the prompt of a conversation, does not show."""
        unshown = self._unshown(text, messages, tools, **options)
        if tools and unshown is not None:
            raise refuse_unshown(tools, unshown)

    def find_template(self, named: str | None, tools: Sequence[Any] | None) -> str:
        """Return the text of the chat template that is used, or will be with these tools. Raises `RequestError`."""
        return self._chats.find_template(named, tools)

    def new_stream(
        self,
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
    ) -> TextStream:
        """Make a decoder for a completion of `prompt_token_ids`."""
        skipped = self._special if skip_special_tokens else frozenset()
        if skipped in self._tables:  # byte-level decoders put no spaces between tokens
            return ByteStream(self._tables[skipped], prompt_token_ids)
        unspaced = {} if skip_special_tokens or spaces_between_special_tokens else self._added
        return WindowStream(self.decode, skipped, prompt_token_ids, unspaced)

    def _unshown(
        self, text: str, messages: list[dict[str, Any]], tools: list[Any] | None, **options: Any
    ) -> str | None:
        return first_unshown(text, tools, partial(self.render_chat, messages, None, **options)) if tools else None

    def _encode(
        self, text: str, *, add_special_tokens: bool, field: str = "prompt", most: int | None = None
    ) -> list[int]:
        backend = self._backend
        try:
            if backend is None or backend.truncation or backend.padding:
                with self._encoding:
                    return list(self.hf.encode(text, add_special_tokens=add_special_tokens, verbose=False))
            if len(text) >= LONG_CHARS:
                return self._encode_long(self._long_texts_of(backend), text, add_special_tokens, most)
            return backend.encode(text, add_special_tokens=add_special_tokens).ids
        except RequestError:
            raise
        except Exception as problem:  # for example a lone surrogate, which is not valid text
            bound = f"text the tokenizer can encode ({type(problem).__name__}: {problem})"
            raise RequestError.for_field(field, text, bound) from problem

    def _encode_long(self, texts: LongTexts, text: str, add_special_tokens: bool, most: int | None) -> list[int]:
        if most is not None and texts.exceeds(text, most):
            hint = f"No token stands for more than {texts.max_chars_per_token} characters. See truncate_prompt_tokens."
            raise RequestError.for_field(
                "prompt", f"{len(text)} characters", f"at most max_model_len={most} tokens long", hint
            )
        token_ids, is_whole = texts.encode(text, add_special_tokens, most)
        if not is_whole:
            got, bound = f"{len(text)} characters, more than {most} tokens", f"at most max_model_len={most} tokens long"
            raise RequestError.for_field("prompt", got, bound, "See truncate_prompt_tokens.")
        return token_ids

    def _long_texts_of(self, backend: Tokenizer) -> LongTexts:
        if self._long_texts is None:
            self._long_texts = LongTexts(backend)
        return self._long_texts

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes that a token adds to a text in UTF-8, which need not be whole characters; none for unknown ids."""
        if (table := self._tables.get(frozenset())) is not None:
            return table[token_id]
        token = str(self.hf.convert_ids_to_tokens(token_id))
        if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes.fromhex(byte[1])
        text = token.replace(_SPACE, " ") if _SPACE in token else self.decode([token_id])  # decoded alone it lacks some
        return text.encode()

    def remove_special_tokens(self, text: str) -> str:
        """Return a text without the special tokens that are spelled in it."""
        return self._spelled.sub("", text) if self._special else text

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ids, special tokens included."""
        if self.hf.is_fast:  # without the clean-up of `decode`, which rewrites earlier text
            if len(token_ids) >= LONG_CHARS:  # as a batch: other threads run meanwhile
                return str(self.hf.backend_tokenizer.decode_batch([token_ids], skip_special_tokens=False)[0])
            return str(self.hf.backend_tokenizer.decode(token_ids, skip_special_tokens=False))
        return str(self.hf.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def tokenizer_directory(config: EngineConfig) -> Path | None:
    """The local directory of an engine's tokenizer; None with `skip_tokenizer_init`. Raises `ConfigError`."""
    if config.skip_tokenizer_init:
        return None
    name, field = _locate_tokenizer(config)
    return find_directory(name, weights=False, field=field)


def _locate_tokenizer(config: EngineConfig) -> tuple[str, str]:
    """The directory or hub id of an engine's tokenizer, and the option that gave it."""
    return (config.tokenizer, "tokenizer") if config.tokenizer else (config.model, "model")


def _backend(hf: PreTrainedTokenizerBase) -> Tokenizer | None:
    """A tokenizer that encodes like `hf`, in half the time, unless it truncates or pads; None: `hf` alone does."""
    if not isinstance(hf, PreTrainedTokenizerFast) or hf.split_special_tokens:
        return None
    own = [vars(each) for each in type(hf).__mro__ if issubclass(each, PreTrainedTokenizerFast)][:-1]
    return None if any(name in each for each in own for name in ("encode", "_encode_plus")) else hf.backend_tokenizer


def _cannot_load(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"No tokenizer could be loaded from '{name}': {reason}. "
        "Give tokenizer=..., or skip_tokenizer_init=True to work with token ids only."
    )
