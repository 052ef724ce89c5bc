"""Options of speculative decoding."""

import os
from typing import Annotated, Any, Literal

import msgspec

from rollout_engine.base.errors import ConfigError, refused
from rollout_engine.base.peer_options import SPECULATION_PEERS
from rollout_engine.base.structs import UserStruct


def _read_model(value: Any) -> Any:
    if hasattr(value, "state_dict"):
        raise ConfigError(
            f"draft_model={type(value).__name__}(...) is not allowed: must be the directory or hub id of a checkpoint. "
            "Save the model there (save_pretrained), and send its weights later by update_weights(model, draft=True)."
        )
    return os.fspath(value) if isinstance(value, os.PathLike) else value


class SpeculationConfig(UserStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):  # type: ignore[metaclass]
    """How tokens are drafted. Whatever is set here, tokens, log-probs and seeds stay as they are: a drafted token is
    kept exactly when it is the token that would have been drawn.

    >>> SpeculationConfig(max_draft_tokens=4)
    """

    error_class = ConfigError
    peers = SPECULATION_PEERS
    readings = {"draft_model": _read_model, "sources": lambda value: [value] if isinstance(value, str) else value}

    sources: tuple[Literal["rollouts", "ngram"], ...] = ("rollouts", "ngram")
    """Where drafts come from. "rollouts": earlier samples of the same prompt, and those in flight that are ahead.
    "ngram": the prompt and the sample's own tokens."""
    max_draft_tokens: Annotated[int, msgspec.Meta(ge=1, le=64)] = 8
    """Most tokens drafted for one sequence in one step."""
    max_rollout_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**40)] = 1 << 24
    """Most tokens of finished samples that are kept to draft from, 4 bytes each: beyond, the prompts that were not
    seen for longest are forgotten."""

    draft_model: Annotated[str, msgspec.Meta(max_length=4096)] | None = None
    """Directory or hub id of a small causal LM with the model's tokenizer, which drafts where `sources` have no draft,
    or one that is less likely to be right. It is run where that pays. Send new weights of it by
    `update_weights(source, draft=True)`."""
    draft_kv_cache_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**50)] | None = None
    """Size of the draft model's KV pool. None: an eighth of the KV pool's, and no more than its tokens need."""

    def check(self) -> None:
        if len(set(self.sources)) < len(self.sources):
            raise ConfigError(refused("sources", self.sources, "'rollouts', 'ngram' or both, each once"))
        if not self.sources and self.draft_model is None:
            raise ConfigError("sources=() and draft_model=None leave nothing to draft from: give one of them.")
        if self.draft_model == "":
            raise ConfigError(refused("draft_model", "", "the directory or hub id of a checkpoint, or None"))
        if self.draft_kv_cache_bytes is not None and self.draft_model is None:
            raise ConfigError("draft_kv_cache_bytes is set without a draft_model: give both, or neither.")


class DraftInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a loaded draft model."""

    num_blocks: int
    """Blocks of its KV pool, of the engine's block size."""
    max_model_len: int
    """Most tokens of a sequence that it drafts for."""
    step_seconds: tuple[tuple[int, float], ...]
    """(rows, seconds) of its steps by their number of rows, ascending, two at least."""
