"""Whether two checkpoints have the same tokens, by their files tokenizer.json."""

from pathlib import Path
from typing import Any

from rollout_engine.model.loading.checkpoint import as_config_errors
from sync.file_snapshot import SnapshotFile
from sync.manifest import decode_json

_FILE = "tokenizer.json"


def first_difference(one: Path, two: Path) -> str | None:
    """The first token id that means different tokens in two directories, as half a sentence about the first.

    None if there is none, and if one of them has no tokenizer.json to compare.
    """
    tokens, others = _tokens_of(one), _tokens_of(two)
    if tokens is None or others is None:
        return None
    for token_id in sorted(tokens.keys() | others.keys()):
        token, other = tokens.get(token_id), others.get(token_id)
        if token != other:
            return f"its token {token_id} is {token!r:.40}, the model's {other!r:.40}"
    return None


def _tokens_of(directory: Path) -> dict[int, str] | None:
    """Token by id."""
    path = directory / _FILE
    if not path.is_file():
        return None
    with as_config_errors():
        content = decode_json(SnapshotFile(path).content(), dict[str, Any], f"{path} is not valid JSON")
    vocabulary = content.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # of a unigram model: pairs of token and score, by id
        tokens = {token_id: str(token) for token_id, (token, _) in enumerate(vocabulary)}
    else:
        tokens = {token_id: token for token, token_id in vocabulary.items()}
    return tokens | {each["id"]: each["content"] for each in content.get("added_tokens", [])}
