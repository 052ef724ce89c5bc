"""llguidance's matchers by its C functions, which its Python package has inside: C++ follows many of them in one call.

Its Python objects do the same one by one (`grammars.masks`), and are used where the functions are missing, no C++
kernels could be built, or the two do not agree.
"""

import ctypes
import logging
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_bool, c_char_p, c_int32, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

import numpy as np

from rollout_engine.grammars.sources import source_of
from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.grammar import functions

logger = logging.getLogger(__name__)

_SPECIAL = b"\xff"
"""Comes before the name of a token that is not text."""
_NO_TOKEN = 0xFFFFFFFF
_LATER_FIELDS = 512
"""Zeros behind a struct of settings, for fields that later versions of llguidance may have."""


class _Limits(ctypes.Structure):
    _fields_ = [
        ("max_items_in_row", c_size_t),
        ("initial_lexer_fuel", c_uint64),
        ("step_lexer_fuel", c_uint64),
        ("step_max_items", c_size_t),
        ("max_lexer_states", c_size_t),
        ("max_grammar_size", c_size_t),
        ("precompute_large_lexemes", c_bool),
        ("verbose_errors", c_bool),
    ]


class _MatcherSettings(ctypes.Structure):
    _fields_ = [
        ("tokenizer", c_void_p),
        ("log_buffer_level", c_uint32),
        ("log_stderr_level", c_uint32),
        ("ff_tokens_ok", c_bool),
        ("backtrack_ok", c_bool),
        ("limits", _Limits),
        ("later", c_uint8 * _LATER_FIELDS),
    ]


class _TokenizerSettings(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("vocab_size", c_uint32),
        ("tok_eos", c_uint32),
        ("token_lens", c_void_p),
        ("token_bytes", c_char_p),
        ("tokenizer_json", c_char_p),
        ("tokenize_assumes_string", c_bool),
        ("tokenize_fn", c_void_p),
        ("use_approximate_greedy_tokenize_fn", c_bool),
        ("tokenize_user_data", c_void_p),
        ("slices", c_void_p),
        ("tok_eos_extra", POINTER(c_uint32)),
        ("tok_eos_extra_count", c_uint32),
    ]


class NativeMatcher:
    """One of llguidance's matchers, which C++ knows by its address."""

    def __init__(self, tokens: "NativeTokens", address: int) -> None:
        self._tokens, self.address = tokens, address

    def deep_copy(self) -> "NativeMatcher":
        """A matcher at the same place, which goes its own way."""
        return NativeMatcher(self._tokens, _library().llg_clone_matcher(self.address))

    def reset(self) -> None:
        """Go back to the beginning of the grammar."""
        _library().llg_matcher_reset(self.address)

    def compute_mask_into(self, mask: np.ndarray) -> None:
        """Fill a mask, uint32 [words]."""
        _library().llg_matcher_compute_mask_into(self.address, mask.ctypes.data, mask.nbytes)

    def consume_token(self, token_id: int) -> bool:
        """Go on by a token, if it is allowed."""
        return not _library().llg_matcher_consume_token(self.address, token_id)

    def get_error(self) -> str:
        """The matcher's error; empty where it has none."""
        text: bytes | None = _library().llg_matcher_get_error(self.address)
        return "" if text is None else text.decode(errors="replace")

    def is_error(self) -> bool:
        """Whether the matcher has an error, and cannot go on."""
        return bool(_library().llg_matcher_is_error(self.address))

    def __del__(self) -> None:
        _library().llg_free_matcher(self.address)


class NativeTokens:
    """The tokens of a tokenizer for grammars that C++ follows. Any thread may use it."""

    _tokenizer: int | None = None

    def __init__(self, tokens: Any, names: Sequence[bytes], limits: Mapping[str, Any]) -> None:
        """`tokens`: an `LLTokenizer`; `names`: of each token, see `names_of`.

        `limits`: of each grammar, by llguidance's names.

        Raises `OSError` or `AttributeError` where llguidance's C functions are missing, and `RuntimeError` where it
        refuses the tokens.
        """
        library = _library()
        self.functions = functions(library)
        self._limits = limits
        lengths = np.array([len(name) for name in names], np.uint32)
        eos = list(tokens.eos_tokens) or [_NO_TOKEN]
        settings = _TokenizerSettings(
            struct_size=ctypes.sizeof(_TokenizerSettings),
            vocab_size=len(names),
            tok_eos=eos[0],
            token_lens=lengths.ctypes.data,
            token_bytes=b"".join(names),
            use_approximate_greedy_tokenize_fn=True,  # no text is divided, as grammars force no tokens: see `sources`
            tok_eos_extra=(c_uint32 * len(eos[1:]))(*eos[1:]),
            tok_eos_extra_count=len(eos) - 1,
        )
        message = ctypes.create_string_buffer(1024)
        self._tokenizer = library.llg_new_tokenizer_v2(byref(settings), message, len(message))
        if not self._tokenizer:
            raise RuntimeError(message.value.decode(errors="replace"))

    def compile(self, source: str) -> NativeMatcher:
        """A matcher at the beginning of a grammar; one with an error where that cannot be."""
        settings = _MatcherSettings()
        _library().llg_constraint_init_set_defaults(byref(settings), self._tokenizer)
        settings.log_buffer_level = settings.log_stderr_level = 0
        for name, value in self._limits.items():
            setattr(settings.limits, name, value)
        address = _library().llg_new_matcher(byref(settings), b"llguidance", source.encode())
        return NativeMatcher(self, address)

    def __del__(self) -> None:  # every matcher refers to it, so none is left
        if self._tokenizer:
            _library().llg_free_tokenizer(self._tokenizer)


def names_of(tokens: Any) -> list[bytes]:
    """An `LLTokenizer`'s tokens as llguidance's C functions read them: their texts, and the names of special ones."""
    return [_name_of(tokens, token_id) for token_id in range(tokens.vocab_size)]


def is_text(name: bytes) -> bool:
    """Whether a token of this name is text that is not empty."""
    return bool(name) and not name.startswith(_SPECIAL)


def native_tokens(
    tokens: Any, names: Sequence[bytes], limits: Mapping[str, Any], python_limits: Any
) -> NativeTokens | None:
    """An `LLTokenizer`'s tokens for C++; None, with a line in the log, where C++ cannot follow grammars here.

    `python_limits`: the same limits as an `LLParserLimits`. The other arguments are as for `NativeTokens`.
    """
    if build.load_kernels() is None:
        return None
    try:
        found = NativeTokens(tokens, names, limits)
        _check(found, tokens, python_limits)
    except (OSError, AttributeError, RuntimeError) as problem:
        logger.warning(
            "Grammars are followed in Python, which is slower, without llguidance's C functions: %s.", problem
        )
        return None
    return found


def _check(native: NativeTokens, tokens: Any, python_limits: Any) -> None:
    """Raise `RuntimeError` unless C functions and Python objects allow the same tokens: versions may differ."""
    import llguidance

    schema = '{"properties": {"key": {"enum": [1, 23, "text"]}}, "required": ["key"], "additionalProperties": false}'
    source = source_of({"json": schema}, {})
    ours, its = native.compile(source), llguidance.LLMatcher(tokens, source, log_level=0, limits=python_limits)
    masks = np.zeros((2, -(-tokens.vocab_size // 32)), np.uint32)
    for token_id in tokens.tokenize_bytes(b'{"key": 2'):
        its.unsafe_compute_mask_ptr(masks[0].ctypes.data, masks[0].nbytes)
        ours.compute_mask_into(masks[1])
        if ours.get_error() or its.get_error() or not np.array_equal(*masks):
            raise RuntimeError("they allow other tokens than its Python objects")
        if (taken := its.consume_token(token_id)) != ours.consume_token(token_id):
            raise RuntimeError("they take other tokens than its Python objects")
        if not taken:  # a tokenizer without such text
            return


def _name_of(tokens: Any, token_id: int) -> bytes:
    name: bytes = tokens.decode_bytes([token_id])
    if tokens.is_special_token(token_id):
        return _SPECIAL + name
    return b"" if name == b"<[%d]>" % token_id else name  # so it writes a token without text


@cache
def _library() -> ctypes.CDLL:
    """llguidance's own library, with its C functions declared."""
    import llguidance._lib

    library = ctypes.CDLL(llguidance._lib.__file__)
    signatures: dict[str, tuple[Any, Sequence[Any]]] = {
        "llg_new_tokenizer_v2": (c_void_p, (c_void_p, c_char_p, c_size_t)),
        "llg_free_tokenizer": (None, (c_void_p,)),
        "llg_constraint_init_set_defaults": (None, (c_void_p, c_void_p)),
        "llg_new_matcher": (c_void_p, (c_void_p, c_char_p, c_char_p)),
        "llg_clone_matcher": (c_void_p, (c_void_p,)),
        "llg_free_matcher": (None, (c_void_p,)),
        "llg_matcher_reset": (c_int32, (c_void_p,)),
        "llg_matcher_compute_mask_into": (c_int32, (c_void_p, c_void_p, c_size_t)),
        "llg_matcher_consume_token": (c_int32, (c_void_p, c_uint32)),
        "llg_matcher_get_error": (c_char_p, (c_void_p,)),
        "llg_matcher_is_error": (c_bool, (c_void_p,)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
