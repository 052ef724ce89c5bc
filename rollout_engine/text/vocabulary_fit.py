"""Checks at start-up whether a tokenizer fits the model, and which ids end a sequence."""

import logging
from collections.abc import Sequence

from rollout_engine.text.tokenizer import TextCodec

logger = logging.getLogger("rollout_engine")


def end_ids(named: Sequence[int], codec: TextCodec | None, vocab_size: int) -> list[int]:
    """Return the ids that end a sequence: those the checkpoint `named`, and the tokenizer's end token, as in vLLM.

    Logs a warning if the tokenizer's is not among those of the checkpoint.
    """
    known = [token_id for token_id in named if 0 <= token_id < vocab_size]
    if len(known) < len(named):
        beyond = sorted(set(named) - set(known))
        logger.warning("eos_token_id %s of the checkpoint cannot be sampled: its vocabulary is %d.", beyond, vocab_size)
    end_id = None if codec is None else codec.hf.eos_token_id
    if codec is None or end_id is None or end_id >= vocab_size:
        if not known:
            logger.warning(
                "No id ends a sequence: neither generation_config.json nor config.json names a usable eos_token_id%s. "
                "Sequences end at max_tokens, stop strings or stop_token_ids alone.",
                "" if codec is None else ", nor does the tokenizer",
            )
        return known
    if end_id in known:
        return known
    logger.warning(
        "The checkpoint's eos_token_id is %s, the tokenizer's end token %r (id %d): %s. ignore_eos=True ignores both.",
        known or "missing",
        codec.hf.eos_token,
        end_id,
        "each of them ends sequences, as in vLLM" if known else "that one ends sequences",
    )
    return [*known, end_id]


def warn_of_larger_tokenizer(codec: TextCodec, vocab_size: int) -> None:
    """Warn if the tokenizer has ids that the model lacks: prompts with them will be refused."""
    if len(codec.hf) <= vocab_size:
        return
    beyond = sorted((token_id, token) for token, token_id in codec.hf.get_vocab().items() if token_id >= vocab_size)
    if beyond:
        logger.warning(
            "The tokenizer has %d tokens that the model, whose vocabulary is %d, does not know; the first is %r (id "
            "%d). Prompts with them are refused: is it this model's tokenizer, and were its embeddings resized?",
            len(beyond),
            vocab_size,
            beyond[0][1],
            beyond[0][0],
        )
