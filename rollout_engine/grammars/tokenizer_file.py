"""Tokenizers as `tokenizer.json` has them, which is how grammars read their tokens."""

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rollout_engine.base.locations import find_directory
from rollout_engine.grammars.vocabulary import GrammarError


def tokenizer_text(name: str, field: str) -> str:
    """The tokenizer of a directory or hub id as `tokenizer.json` has it.

    Raises `GrammarError`, and `ConfigError` if it is not found.
    """
    directory = find_directory(name, weights=False, field=field)
    return serialize_tokenizer(AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True))


def serialize_tokenizer(hf: PreTrainedTokenizerBase) -> str:
    """A tokenizer as `tokenizer.json` has it, with the tokens that its other files add. Raises `GrammarError`."""
    if not hf.is_fast:
        raise GrammarError(f"the tokenizer {type(hf).__name__} is not one of the tokenizers package's")
    return str(hf.backend_tokenizer.to_str())
