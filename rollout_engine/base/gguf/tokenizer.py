"""Makes tokenizer.json and tokenizer_config.json from the metadata of a GGUF file.

A GGUF file has the name of the way in which text is divided before merges apply, and no more of it. Divisions have a
row if the original tokenizer's own is in this file; transformers (5.23) takes GPT-2's for each name that it lacks,
"smollm" among them.
"""

from typing import Any

from rollout_engine.base.errors import ConfigError
from rollout_engine.base.gguf.header import GgufHeader

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _byte_level(use_regex=False)]


_GPT2 = [_byte_level(use_regex=True)]
_DIVISIONS = {
    "gpt-2": _GPT2,
    "smollm": [{"type": "Digits", "individual_digits": True}, *_GPT2],
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
}
"""`tokenizer.ggml.pre` -> the pre-tokenizers of the original tokenizer.json."""
_CONTROL, _USER_DEFINED = 3, 4
_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_of(header: GgufHeader) -> dict[str, Any]:
    """The content of tokenizer.json. Raises `ConfigError` for a tokenizer that cannot be made as it was."""
    kind, division = header.need("tokenizer.ggml.model", str), header.get("tokenizer.ggml.pre", str)
    if kind != "gpt2" or division not in _DIVISIONS or header.get("tokenizer.ggml.add_space_prefix", bool):
        raise ConfigError(
            f"{header.path} has a tokenizer of the kind {kind!r:.40}, divided as {division!r:.40}, that is not read "
            f"here: expected 'gpt2', divided as one of {', '.join(_DIVISIONS)}, without a prefix space"
        )
    tokens, merges = _strings(header, "tokens"), _strings(header, "merges")
    types: list[int] = header.get("tokenizer.ggml.token_type", list) or [1] * len(tokens)
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [merge.split(" ") for merge in merges]
    if len(vocabulary) < len(tokens) or len(types) != len(tokens) or any(len(pair) != 2 for pair in pairs):
        raise ConfigError(f"{header.path}: its tokens, their types or their merges contradict each other")
    return {
        "version": "1.0",
        "added_tokens": [
            _added_token(token_id, tokens[token_id], special=kind == _CONTROL)
            for token_id, kind in enumerate(types)
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if division == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _DIVISIONS[division]},
        "post_processor": _template(header, tokens, adds_bos=division == "llama-bpe"),
        "decoder": _byte_level(use_regex=True),
        "model": {"type": "BPE", "vocab": vocabulary, "merges": pairs, "ignore_merges": division == "llama-bpe"},
    }


def tokenizer_config_of(header: GgufHeader) -> dict[str, Any]:
    """The content of tokenizer_config.json: special tokens and the chat template. Raises `ConfigError`."""
    tokens = _strings(header, "tokens")
    found = {name: _token(header, tokens, kind) for name, kind in _NAMES.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": header.get("tokenizer.chat_template", str),
        **{name: token for name, token in found.items() if token is not None},
    }


def _strings(header: GgufHeader, name: str) -> list[str]:
    return [str(each) for each in header.need(f"tokenizer.ggml.{name}", list)]


def _token(header: GgufHeader, tokens: list[str], kind: str) -> str | None:
    token_id = header.get(f"tokenizer.ggml.{kind}_token_id", int)
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise ConfigError(f"{header.path}: tokenizer.ggml.{kind}_token_id={token_id}, and it has {len(tokens)} tokens")
    return tokens[token_id]


def _added_token(token_id: int, token: str, *, special: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": token, **plain, "special": special}


def _template(header: GgufHeader, tokens: list[str], *, adds_bos: bool) -> dict[str, Any] | None:
    """The post-processor that adds tokens in front of a text and behind it; None if none are added.

    `adds_bos`: whether llama.cpp adds the first token if the file has no such flag.
    """
    added = {
        "bos": header.get("tokenizer.ggml.add_bos_token", bool),
        "eos": header.get("tokenizer.ggml.add_eos_token", bool),
    }
    if added["bos"] is None:
        added["bos"] = adds_bos
    spelled = {kind: token for kind in added if added[kind] and (token := _token(header, tokens, kind)) is not None}
    if len(spelled) < sum(map(bool, added.values())):
        raise ConfigError(f"{header.path} adds a token to each text, and has no id of it")
    if not spelled:
        return None

    def piece(sequence: str) -> list[dict[str, Any]]:
        number = "AB".index(sequence)
        marks = [
            {"SpecialToken": {"id": spelled[kind], "type_id": number}} if kind in spelled else None for kind in added
        ]
        return [each for each in (marks[0], {"Sequence": {"id": sequence, "type_id": number}}, marks[1]) if each]

    ids = {token: header.need(f"tokenizer.ggml.{kind}_token_id", int) for kind, token in spelled.items()}
    return {
        "type": "TemplateProcessing",
        "single": piece("A"),
        "pair": piece("A") + piece("B"),
        "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]} for token, i in ids.items()},
    }
