"""Scores of rollouts by an engine: `RolloutPolicy.score`, and the pass that gives all that a teacher is asked for."""

import logging
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor

from rollout_engine.base.lora_request import LoRALike
from rollout_engine.base.provenance import rollout_note
from rollout_engine.base.token_scores import TokenScores
from rollout_engine.batches.layout import check_batch
from rollout_engine.faces.frontend import Frontend
from rollout_engine.faces.verb_methods import BlockingVerbs
from rollout_engine.rollouts.scored_batch import ScoredBatch, as_candidate_tensor

logger = logging.getLogger("rollout_engine")
_warned: WeakSet[Frontend] = WeakSet()
"""Engines whose scores of a processed rollout were warned of."""


def score_rollout(
    engine: BlockingVerbs,
    batch: TensorDictBase,
    candidate_ids: Any,
    *,
    replay_routing: bool = False,
    **options: Any,
) -> Tensor:
    """Do as `RolloutPolicy.score`, whose other arguments are `options`."""
    needed = ["tokens", "masks", *(["routed_experts"] if replay_routing else [])]
    otherwise = "Token ids alone are scored by the engine: LLM.score(prompt_token_ids, completion_token_ids)."
    check_batch(batch, needed=needed, otherwise=otherwise)
    _warn_of_processed(engine.frontend, batch)
    scored = ScoredBatch(batch)
    if replay_routing:
        options["routed_experts"] = [batch["routed_experts"][row.place][:-1].numpy() for row in scored.rows]
    if candidate_ids is None:
        results = BlockingVerbs.score(engine, *scored.pairs, pictures=scored.pictures, **options)  # type: ignore[arg-type]
        return scored.spread(np.concatenate([np.zeros(0, np.float32), *results]), 0.0)
    candidates = as_candidate_tensor(candidate_ids, batch, engine.frontend.client.info.vocab_size)
    found = score_pass(engine, scored, candidates=scored.take(candidates).numpy(), **options)
    assert found.candidates is not None
    return scored.spread(found.candidates, 0.0)


def _warn_of_processed(frontend: Frontend, batch: TensorDictBase) -> None:
    """Log a warning, once for each engine, if the log-probs of a rollout are not of the whole vocabulary."""
    note = rollout_note(batch["tokens", "full"])
    if note is None or (note.temperature is not None and not note.over_support) or frontend in _warned:
        return
    _warned.add(frontend)
    cause = (
        "renormalised over batch['support']" if note.over_support else "of edited logits, or of several temperatures"
    )
    logger.warning(
        "score: the rollout's log-probs are %s, and scores are of the whole vocabulary at one temperature: do not "
        "subtract one from the other. Sample with logprobs_mode='tempered', the default.",
        cause,
    )


def score_pass(
    engine: BlockingVerbs,
    scored: ScoredBatch,
    *,
    prompts: Sequence[list[int]] | None = None,
    candidates: np.ndarray | None = None,
    top_k: int = 0,
    lora: LoRALike | None = None,
    routed_experts: Sequence[np.ndarray] | None = None,
    **options: Any,
) -> TokenScores:
    """Scores of all completions, end to end, in as many calls as their number needs.

    `prompts`: in place of the rows' own. `candidates`: integers [N, K] of the N tokens of all completions. Other
    arguments are those of the verb `score_candidates`. The weights of one call are those of its beginning to its end.
    """
    width = 1 + top_k * 2 + (0 if candidates is None else candidates.shape[1])
    given = [row.prompt for row in scored.rows] if prompts is None else list(prompts)
    completions, pictures = [row.completion for row in scored.rows], scored.pictures
    parts = [TokenScores.empty(None if candidates is None else candidates.shape[1], top_k)]
    for rows, tokens in scored.pieces(width):
        parts.append(
            engine.score_candidates(
                given[rows],
                completions[rows],
                None if candidates is None else candidates[tokens],
                top_k=top_k,
                lora=lora,  # type: ignore[arg-type]  # the verb's `prepare` reads it
                routed_experts=None if routed_experts is None else routed_experts[rows],
                pictures=None if pictures is None else pictures[rows],  # type: ignore[arg-type]  # likewise
                **options,
            )
        )
    return TokenScores.join(parts)
