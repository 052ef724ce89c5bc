"""The columns that came back from the runner, as the front end gets them."""

from collections.abc import Container
from typing import cast

from rollout_engine.core.request import Sequence
from rollout_engine.messages import EngineCoreOutputs, IdLogprobs, ModelRunnerOutput


def fill_columns(outputs: EngineCoreOutputs, drawn: list[Sequence], result: ModelRunnerOutput) -> None:
    """What `drawn`, one sequence per row of `result`, gained.

    Rows with an error are left out, and those of sequences that had ended before.
    """
    outputs.sequences = [sequence.sequence_id for sequence in drawn]
    outputs.kv_min_versions = cast(list[int], [sequence.kv_min_version for sequence in drawn])  # None: it has ended
    outputs.token_ids = result.token_ids
    outputs.logprobs = result.logprobs
    outputs.kept_logprob_mass = result.kept_logprob_mass
    outputs.top_logprobs = result.top_logprobs
    outputs.sampled_ranks = result.sampled_ranks
    left_out = {row for row, sequence in enumerate(drawn) if sequence.ended} | result.errors.keys()
    if left_out:
        _leave_out(outputs, left_out)
    if result.id_logprobs:
        rows = {drawn[row].sequence_id: values for row, values in result.id_logprobs.items() if row not in left_out}
        outputs.id_logprobs = IdLogprobs.of(rows)


def _leave_out(outputs: EngineCoreOutputs, rows: Container[int]) -> None:
    kept = [row for row in range(len(outputs.sequences)) if row not in rows]
    for name in ("sequences", "kv_min_versions", "token_ids", "logprobs", "kept_logprob_mass"):
        column = getattr(outputs, name)
        if column is not None:
            setattr(outputs, name, [column[row] for row in kept])
    if outputs.top_logprobs is not None:
        ids, values = outputs.top_logprobs
        outputs.top_logprobs = (ids[kept], values[kept])
    if outputs.sampled_ranks is not None:
        outputs.sampled_ranks = outputs.sampled_ranks[kept]
