"""Explains a token of a logged rollout by the trace of the engine that drew it (`EngineConfig(step_trace=...)`).

The text has the step that drew it and its version, the other work in the batch, the tokens found in the prefix
cache, the times when the sequence lost its KV, and whether the token was drafted. None of that changes a bit; it
explains the time taken.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rollout_engine.base.errors import RequestError
from rollout_engine.batches.picture_files import hex_digest
from rollout_engine.batches.rollout_files import sample_problem
from rollout_engine.engine.step_trace import Row, Trace, TracedSequence, TracedStep, prompt_checksum, read_traces
from rollout_engine.rollouts.episodes.episode import seed_of_turn

Sample = Mapping[str, Any]
"""One sample of a file, as `read_jsonl` returns it."""
_CLOCKS_DIFFER = 2.0
"""Seconds by which the clock of an engine's machine may differ from that of the log's."""


class Computed(NamedTuple):
    """A time when the tokens of a sequence were computed from the beginning: at first, or after it had lost its KV."""

    num_cached_tokens: int
    """Tokens found in the prefix cache, and not computed."""
    steps: list[int]
    """Numbers of the steps that computed more than one token of it, or its first."""
    version: int
    by: int
    """The sequence that computed them: another one if it was forked from that."""


class Origin(NamedTuple):
    """The step and the sequence that drew a token."""

    trace: str
    step: TracedStep
    sequence: TracedSequence
    position: int
    """Place of the token in its sequence, prompt included."""
    draft_place: int
    """Place in the draft that it confirmed, the first being 1; 0: it was not drafted."""
    num_others: int
    """Sequences of the same seed, prompt, version and time, of which this one is the newest."""
    computed: list[Computed]
    """Computations of the sequence up to that step, oldest first."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that the step computed, of all sequences."""
        return sum(row.num_tokens for row in self.step.rows or ())


def explain(
    sample: Sample, place: int, directory: str | os.PathLike[str], samples: Iterable[Sample] = ()
) -> tuple[Origin, str]:
    """The origin of the token at `place` of a sample's response, and a text about it.

    `directory`: the directory of the engine's trace. `samples`: others of the file, to name batch mates by. Raises
    `RequestError` for a token that was not sampled, and if no trace has it: traces are bounded and drop old steps.
    """
    if reason := sample_problem(sample):
        raise RequestError.for_field("sample", sample, "a rollout", f"{reason}.")
    ids, versions = sample["response_token_ids"], sample["policy_version"]
    if not 0 <= place < len(ids):
        raise RequestError.for_field("--token", place, f"from 0 to {len(ids) - 1}")
    if versions[place] < 0:
        raise RequestError.for_field(
            "--token", place, "a sampled token", "A template or an environment wrote this one."
        )
    if not Path(directory).is_dir():
        hint = "It is EngineConfig(step_trace=...) of the engine that made the rollouts."
        raise RequestError.for_field("--trace", str(directory), "a directory with traces", hint)
    turns = sample.get("turns") or [0] * len(ids)
    first = turns.index(turns[place])
    prompt = [*sample["prompt_token_ids"], *ids[:first]]
    seed = seed_of_turn(sample["seed"], turns[place]) % 2**64
    position = len(sample["prompt_token_ids"]) + place
    since, until = sample.get("made") or (-math.inf, math.inf)
    found: list[tuple[float, Trace, Origin]] = []
    for trace in read_traces(directory):
        for sequence in _sequences(trace):
            if (sequence.seed, sequence.num_prompt_tokens) != (seed, len(prompt)):
                continue
            origin = _origin(trace, sequence, position, versions[place])
            if origin is not None and sequence.checksum == prompt_checksum(prompt):
                found.append((max(since - origin.step.at, origin.step.at - until, 0), trace, origin))
    found = [each for each in found if each[0] <= _CLOCKS_DIFFER]
    if not found:
        hint = "It is bounded by step_trace_bytes and forgets the oldest steps, or another engine drew the token."
        raise RequestError.for_field("--trace", str(directory), "a trace that has this token", hint)
    nearest = min(each[0] for each in found)
    found = [each for each in found if each[0] == nearest]
    _, trace, origin = found[-1]
    origin = origin._replace(num_others=len(found) - 1)
    return origin, _text(sample, place, origin, _names(trace, samples))


def _sequences(trace: Trace) -> list[TracedSequence]:
    new = (sequence for step in trace.steps for sequence in step.new)
    return list({sequence.id: sequence for sequence in (*trace.live, *new)}.values())


def _origin(trace: Trace, sequence: TracedSequence, position: int, version: int) -> Origin | None:
    """The origin of the token at `position` of a sequence; None if it is not in the trace."""
    for step in trace.steps:
        if step.version == version:
            for start, num_drawn in _list_draws(step, sequence.id):
                if start <= position < start + num_drawn:
                    place = position - start
                    draft_place = place + 1 if place < num_drawn - 1 else 0  # the last one is no guess
                    computed = list(_list_computed(trace, sequence, step))
                    return Origin(trace.name, step, sequence, position, draft_place, 0, computed)
    return None


def _list_draws(step: TracedStep, sequence_id: int) -> Iterator[tuple[int, int]]:
    """(position, number) of the tokens that a step drew for a sequence."""
    if step.problem:
        return
    for index, (name, row_index) in enumerate(step.samples):
        if name == sequence_id:
            row = (step.rows or [])[row_index]
            yield row.start + row.num_tokens - row.num_drafts, step.drawn[index] if step.drawn else 1


def _list_computed(trace: Trace, sequence: TracedSequence, last: TracedStep) -> Iterator[Computed]:
    """Each time that the sequence, or the one that it was forked from, was computed from the beginning.

    A time before the oldest step of the trace is not among them.
    """
    source = next((row.id for step in trace.steps for row in _rows_of(step, sequence.id)), sequence.id)
    is_known = all(each.id != source for each in trace.live)
    current: Computed | None = None
    for step in trace.steps:
        if step.step > last.step:
            break
        if sequence.id in step.released:
            if current is not None:
                yield current
            current, source, is_known = None, sequence.id, True
        for row in step.rows or ():
            if row.id != source or step.problem or not is_known:
                continue
            if current is None:
                current = Computed(row.start, [step.step], step.version, source)
            elif row.num_tokens - row.num_drafts > 1:
                current.steps.append(step.step)
    if current is not None:
        yield current


def _rows_of(step: TracedStep, sequence_id: int) -> list[Row]:
    """The rows from which tokens of a sequence were drawn."""
    return [(step.rows or [])[row] for name, row in step.samples if name == sequence_id]


def _names(trace: Trace, samples: Iterable[Sample]) -> dict[int, str]:
    """Sequence id -> the sample of the file that has its seed, as far as the seed identifies it."""
    known: dict[int, str] = {}
    for sample in samples:
        for turn in {*(sample.get("turns") or [0])} - {-1}:
            known[seed_of_turn(sample["seed"], turn) % 2**64] = f"group {sample['group_id']}"
    return {each.id: known[each.seed] for each in _sequences(trace) if each.seed in known}


def _text(sample: Sample, place: int, origin: Origin, names: Mapping[int, str]) -> str:
    step, sequence = origin.step, origin.sequence
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(step.at))
    logprob = f"{sample['log_probs'][place]:.6g}"
    lines = [
        f"group {sample['group_id']}, sample {sample['sample_index']}, token {place} of the response: id "
        f"{sample['response_token_ids'][place]}, log-prob {logprob}",
        f"  step {step.step} of {origin.trace} drew it under version {step.version}",
        f"  {at}, in {step.seconds * 1e3:.2f} ms",
        f"  sequence {sequence.id}, seed {sequence.seed}, position {origin.position}, prompt of "
        f"{sequence.num_prompt_tokens} tokens",
    ]
    if shown := [each for each in sample.get("pictures") or () if each["end"] <= sequence.num_prompt_tokens]:
        spans = ", ".join(f"{hex_digest(each['picture'])} at {each['start']} to {each['end'] - 1}" for each in shown)
        lines.append(f"  pictures of the prompt: {spans}")
    if origin.draft_place:
        lines.append(f"  it was drafted, and the draw confirmed it: place {origin.draft_place} of the draft")
    rows = step.rows or []
    mates = Counter(names.get(row.id, "no line of this file") for row in rows if row.id != sequence.id)
    told = ", ".join(f"{times} of {name}" for name, times in mates.most_common(8))
    lines.append(
        f"  batch: {len(rows)} {'row' if len(rows) == 1 else 'rows'}, {origin.num_computed_tokens} tokens"
        + (f"; besides it {told}" if told else "")
    )
    for i, each in enumerate(origin.computed):
        lines.append("  " + _describe_computed(each, sequence, i, origin.computed[i - 1] if i else None))
    if not origin.computed:
        lines.append("  its prompt was computed before the oldest step of the trace")
    if origin.num_others:
        lines.append(
            f"  this is the newest: {origin.num_others} more of that time with the same seed, prompt and version"
        )
    return "\n".join(lines)


def _describe_computed(each: Computed, sequence: TracedSequence, number: int, before: Computed | None) -> str:
    steps = f"step {each.steps[0]}" if len(each.steps) == 1 else f"steps {', '.join(map(str, each.steps[:12]))}"
    by = "" if each.by == sequence.id else f" by sequence {each.by}, for all samples of its prompt"
    cached = (
        f"{each.num_cached_tokens} tokens were in the prefix cache" if each.num_cached_tokens else "nothing was cached"
    )
    if before is None:
        return f"computed from the beginning in {steps}{by}: {cached}"
    why = "preempted, or its prefix was reset"
    if each.version != before.version:
        why = 'preempted, or computed again after an update (kv="recompute")'
    return f"it lost its KV ({why}), and was computed again from {steps} on: {cached}"
