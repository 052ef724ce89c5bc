"""A deterministic fake model over simulated KV blocks and states, which raises when it reads stale or foreign ones."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Literal

import numpy as np

from rollout_engine.base.messages import (
    KVSave,
    ModelRunnerOutput,
    NewSequence,
    ScheduledSequence,
    SchedulerOutput,
    StateMove,
)
from rollout_engine.base.pictures import Picture, PlacedPicture
from rollout_engine.base.pooling_params import PoolingParams
from rollout_engine.base.seeds import mix
from rollout_engine.base.sequence_error import SequenceError
from rollout_engine.base.thinking import ThinkingState
from rollout_engine.core.fake_columns import fake_states, prompt_columns, with_columns
from rollout_engine.core.fake_states import FakeKVError, FakeState, FakeStates
from rollout_engine.core.fake_tier import FakeTransfer


class FakeExecutor:
    """An `Executor` without a model. The next token is `fake_next_token` of the context read through the blocks.

    Every slot (block, offset) holds (digest of the context up to its token, version that computed it), and each
    write and each sample reads its context back through the block table.
    """

    def __init__(
        self,
        *,
        block_size: int,
        vocab_size: int,
        fail_at_steps: Collection[int] = (),
        scripts: Mapping[int, list[int]] = MappingProxyType({}),
        errors: Mapping[int, str] = MappingProxyType({}),
        uncomputable: Collection[int] = (),
        draft_model: "FakeExecutor | None" = None,
        num_state_slots: int = 0,
        image_token_id: int = -1,
    ) -> None:
        self.image_token_id = image_token_id
        """Token that stands for features of pictures."""
        self.draft_model = draft_model
        """The model that drafts, over blocks of its own."""
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.fail_at_steps = fail_at_steps
        """Values of `SchedulerOutput.step` at which to raise, when half of the work is done."""
        self.scripts = scripts
        """Sequence id -> its first tokens, for example a stop id."""
        self.errors = errors
        """Sequence id -> message reported in place of its next token."""
        self.uncomputable = uncomputable
        """Sequence ids for which a step raises a `SequenceError`, before anything is computed."""
        self.sequences: dict[int, FakeSequence] = {}
        self.num_steps = 0
        self.num_tokens_computed = 0
        self.kv_min_versions: dict[int, int] = {}
        """Sequence id -> oldest version among the KV its last sample, or its pooled prompt, attended."""
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}
        self._routed: set[tuple[int, int]] = set()
        """Slots whose tokens' experts were recorded."""
        self._states, self._state_slots = FakeStates(num_state_slots), dict[int, int]()
        """Slots of states, and the one of each sequence, if the model keeps any."""
        self.weights: Literal["live", "kept", "forgotten"] = "live"
        """`restore_weights` sets "live", and so do tests in place of an update."""
        self.transfer = FakeTransfer(block_size, self._slots, self._routed, self._states)

    def submit(self, work: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Run the step when its result is asked for."""
        return partial(self.execute, work)

    def draft(self, work: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step of the draft model."""
        assert self.draft_model is not None, "nothing drafts"
        return self.draft_model.execute(work)

    def execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step in the order of `SchedulerOutput`. Raises `FakeKVError` for KV or states of another context."""
        for sequence_id in work.finished_sequence_ids:
            self.sequences.pop(sequence_id, None)
            self.kv_min_versions.pop(sequence_id, None)
            self._state_slots.pop(sequence_id, None)
        for new in work.new:
            if new.sequence_id in self.sequences:
                raise FakeKVError(f"sequence {new.sequence_id} is new, but already known")
            self.sequences[new.sequence_id] = FakeSequence(new, self.image_token_id)
        for row in work.scheduled:
            self.sequences[row.sequence_id].block_ids[row.first_block :] = row.block_ids
        for row in work.scheduled:
            if row.sequence_id in self.uncomputable:
                raise SequenceError(row.sequence_id, "it cannot be computed")
        self.transfer.save(work.kv_saves)
        self.transfer.load(work.kv_loads, work.policy_version)
        self._copy_blocks(work.block_copies)
        self._check_slots(work.scheduled)
        moves = self._states.resolve(work.scheduled, self._state_slots)
        if work.scheduled and self.weights != "live":
            raise FakeKVError("computed while the weights are released")
        records = any(self.sequences[row.sequence_id].params.return_routed_experts for row in work.scheduled)
        for index, (row, move) in enumerate(zip(work.scheduled, moves, strict=True)):
            if work.step in self.fail_at_steps and index == len(work.scheduled) // 2:
                raise RuntimeError(f"told to fail at step {work.step}")
            self._compute(row, move, work.policy_version, records)
        whole, pooled = self._read_prompts(work.scheduled), self._pool(work.scheduled)
        routed = self._route_prompts(work.scheduled)
        self.num_steps += 1
        output = self._sample(work)
        output.pooled, output.prompt_routed_experts = pooled, routed
        for index, state in whole.items():
            prompt = state.token_ids[: state.num_prompt_tokens]
            if state.params.prompt_logprobs is not None:
                output.prompt_logprobs[index] = prompt_columns(prompt, state.params, self.vocab_size)
            if state.params.return_hidden_states == "all":
                output.prompt_hidden_states[index] = fake_states(prompt)
        return output

    def save_kv(self, saves: list[KVSave]) -> None:
        """Give blocks and states to the KV connector."""
        self.transfer.save(saves)

    def release_kv(self) -> None:
        """Forget all KV and states."""
        self._slots.clear()
        self._routed.clear()
        self._states.clear()

    def release_weights(self, *, forget: bool) -> None:
        """Refuse to compute until the weights are back."""
        self.weights = "forgotten" if forget or self.weights == "forgotten" else "kept"

    def restore_weights(self) -> None:
        """Compute again. Raises `FakeKVError` for weights that were forgotten."""
        if self.weights == "forgotten":
            raise FakeKVError("forgotten weights cannot be restored")
        self.weights = "live"

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        written: set[int] = set()
        for source, destination in copies:
            if {source, destination} & written:
                raise FakeKVError(f"the copies {copies} depend on their order beyond reading before writing")
            written.add(destination)
            self.transfer.note_write(destination)
            for offset in range(self.block_size):
                if (source, offset) in self._slots:
                    self._slots[destination, offset] = self._slots[source, offset]
                    self._mark_routed((destination, offset), (source, offset) in self._routed)

    def _check_slots(self, scheduled: list[ScheduledSequence]) -> None:
        written = [self._slot(row, position) for row in scheduled for position in _positions(row)]
        if len(set(written)) < len(written):
            raise FakeKVError("two sequences write the same KV slot in one step")

    def _mark_routed(self, slot: tuple[int, int], is_routed: bool) -> None:
        (self._routed.add if is_routed else self._routed.discard)(slot)

    def _compute(self, row: ScheduledSequence, move: StateMove | None, version: int, records: bool) -> None:
        digest, oldest = self._read(row, row.num_computed_tokens)
        if move is not None:
            self._states.read(row.sequence_id, move, FakeState(digest, oldest))
        tokens = self.sequences[row.sequence_id].context + row.draft_token_ids
        for num_done, position in enumerate(_positions(row), start=1):
            digest, oldest = mix(digest, tokens[position]), min(oldest, version)
            if move is not None:
                self._states.write(move, num_done, row.num_scheduled_tokens, FakeState(digest, oldest))
            self._slots[self._slot(row, position)] = (digest, version)
            self.transfer.note_write(self._slot(row, position)[0])
            self._mark_routed(self._slot(row, position), records)
            self.num_tokens_computed += 1

    def _read_prompts(self, scheduled: list[ScheduledSequence]) -> dict[int, "FakeSequence"]:
        """Complete prompts of which log-probs or states are returned. Raises if a part was not computed."""
        found = {}
        for index, row in enumerate(scheduled):
            state = self.sequences[row.sequence_id]
            asks = state.params.prompt_logprobs is not None or state.params.return_hidden_states == "all"
            if not asks or state.num_sampled:
                continue
            if state.num_scored != row.num_computed_tokens:
                raise FakeKVError(
                    f"sequence {row.sequence_id}: prompt tokens from {state.num_scored} on are not scored"
                )
            state.num_scored += row.num_scheduled_tokens
            if state.num_scored == state.num_prompt_tokens:
                found[index] = state
        return found

    def _pool(self, scheduled: list[ScheduledSequence]) -> dict[int, np.ndarray]:
        """Make up results of prompts that are complete. Raises if a part that one is made of was not computed."""
        found = {}
        for index, row in enumerate(scheduled):
            state = self.sequences[row.sequence_id]
            if state.pooling is None:
                continue
            end = row.num_computed_tokens + row.num_scheduled_tokens
            if state.pooling.kind != "last" and state.num_pooled != row.num_computed_tokens:
                raise FakeKVError(f"sequence {row.sequence_id}: tokens from {state.num_pooled} on are not pooled")
            state.num_pooled = end
            if end == state.num_prompt_tokens:
                self.kv_min_versions[row.sequence_id] = self._read(row, end)[1]
                found[index] = fake_pooled(state.token_ids, state.pooling)
        return found

    def _route_prompts(self, scheduled: list[ScheduledSequence]) -> dict[int, np.ndarray]:
        """The experts of complete prompts. Raises for those of a token that was computed for no request that asks."""
        found = {}
        for index, row in enumerate(scheduled):
            state, end = self.sequences[row.sequence_id], row.num_computed_tokens + row.num_scheduled_tokens
            if not state.params.return_routed_experts or state.num_sampled or end < state.num_prompt_tokens:
                continue
            slots = [self._slot(row, position) for position in range(end - 1)]
            if not self._routed.issuperset(slots):
                raise FakeKVError(f"sequence {row.sequence_id}: the experts of some prompt tokens were not recorded")
            found[index] = np.array([_experts(self._slots[slot][0]) for slot in slots], np.uint8).reshape(-1, 1, 2)
        return found

    def _sample(self, work: SchedulerOutput) -> ModelRunnerOutput:
        token_ids: list[int] = []
        routed: list[list[list[int]]] = []
        errors, params, num_drawn = {}, [], []
        for task in work.samples:
            row, state = work.scheduled[task.row], self.sequences[task.sequence_id]
            end = row.num_computed_tokens + row.num_scheduled_tokens - len(row.draft_token_ids)
            known, start = len(state.token_ids), len(token_ids)
            if known != end:
                raise FakeKVError(f"sequence {task.sequence_id} has {known} tokens, but samples after {end}")
            for draft in [*row.draft_token_ids, None]:
                digest, self.kv_min_versions[task.sequence_id] = self._read(row, len(state.token_ids))
                routed.append(_experts(digest))
                if task.sequence_id in self.errors:
                    errors[len(token_ids)] = self.errors[task.sequence_id]
                    token_ids.append(-1)
                else:
                    token_ids.append(self._next_token(task.sequence_id, digest))
                state.token_ids.append(max(token_ids[-1], 0))
                if token_ids[-1] != draft:
                    break
            num_drawn.append(len(token_ids) - start)
            params += [state.params] * num_drawn[-1]
        output = with_columns(token_ids, params, errors, self.vocab_size)
        if any(each.return_routed_experts for each in params):
            output.routed_experts = np.array(routed, np.uint8)
        output.num_drawn = num_drawn if any(row.draft_token_ids for row in work.scheduled) else None
        return output

    def _next_token(self, sequence_id: int, digest: int) -> int:
        state = self.sequences[sequence_id]
        script = self.scripts.get(sequence_id, [])
        if (forced := state.forced) is not None:
            return forced
        if state.num_sampled < len(script):
            return script[state.num_sampled]
        return _draw(digest, state.seed, self.vocab_size, state.banned)

    def _read(self, row: ScheduledSequence, end: int) -> tuple[int, int]:
        """Read (digest of the context, its oldest version) from the blocks. Raises if they disagree with the tokens."""
        digest, oldest = 0, 2**63
        for position, token_id in enumerate(self.sequences[row.sequence_id].context[:end]):
            digest = mix(digest, token_id)
            found = self._slots.get(self._slot(row, position))
            if found is None:
                raise FakeKVError(f"sequence {row.sequence_id} reads position {position}, which was never written")
            if found[0] != digest:
                raise FakeKVError(f"sequence {row.sequence_id} reads KV of another context at position {position}")
            oldest = min(oldest, found[1])
        return digest, oldest

    def _slot(self, row: ScheduledSequence, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.block_size)
        block_ids = self.sequences[row.sequence_id].block_ids
        if index >= len(block_ids):
            raise FakeKVError(f"sequence {row.sequence_id} has no block for position {position}")
        return block_ids[index], offset


class FakeSequence:
    """State of a sequence in the fake runner."""

    __slots__ = (
        *("block_ids", "features", "num_pooled", "num_prompt_tokens", "num_scored"),
        *("_thinking", "params", "pooling", "seed", "stop_ids", "token_ids"),
    )

    def __init__(self, new: NewSequence, image_token_id: int) -> None:
        self.token_ids = new.token_ids
        self.features = fake_features(new.token_ids, new.pictures, image_token_id)
        """Position -> the feature there, in place of its token."""
        self.block_ids: list[int] = []
        self.num_prompt_tokens = new.num_prompt_tokens
        self.num_scored = 0
        """Prompt tokens that were scored so far."""
        self.params, self.pooling = new.params, new.pooling
        self.num_pooled = 0
        """Prompt tokens before this one were computed since the sequence arrived."""
        self.seed = new.seed
        self.stop_ids = {*new.eos_token_ids, *(new.params.stop_token_ids or ())}
        self._thinking = None if new.thinking is None else ThinkingState(new.thinking, new.num_prompt_tokens)

    @property
    def forced(self) -> int | None:
        """The next token, if a budget of thinking forces it."""
        return None if self._thinking is None else self._thinking.next_forced(self.token_ids)

    @property
    def context(self) -> list[int]:
        """All tokens so far, with features in their places: the next one depends on these."""
        if not self.features:
            return self.token_ids
        return [self.features.get(position, token_id) for position, token_id in enumerate(self.token_ids)]

    @property
    def num_sampled(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def banned(self) -> Collection[int]:
        """Stop ids, while there are fewer than `min_tokens` tokens."""
        return self.stop_ids if self.num_sampled < self.params.min_tokens else ()


def fake_next_token(context: list[int], seed: int, vocab_size: int, banned: Collection[int] = ()) -> int:
    """The token that the fake model samples after `context`, from the tokens alone: the reference of tests."""
    digest = 0
    for token_id in context:
        digest = mix(digest, token_id)
    return _draw(digest, seed, vocab_size, banned)


def fake_features(token_ids: list[int], pictures: list[PlacedPicture], image_token_id: int) -> dict[int, int]:
    """The features of the fake model by their positions: numbers that depend on the picture and their place in it."""
    found: dict[int, int] = {}
    for placed in pictures:
        if Picture.of(placed.picture.arrays).digest != placed.picture.digest:
            raise FakeKVError("a picture arrived without its arrays, or with those of another one")
        span = range(placed.start, placed.end)
        places = [position for position in span if token_ids[position] == image_token_id]
        seed = int.from_bytes(placed.picture.digest)
        found |= {position: mix(seed, number) for number, position in enumerate(places)}
    return found


def fake_routed_experts(token_ids: list[int]) -> np.ndarray:
    """The experts of the fake model for every token but the last, uint8 [n - 1, 1, 2]: they depend on the context."""
    digest, rows = 0, []
    for token_id in token_ids[:-1]:
        digest = mix(digest, token_id)
        rows.append(_experts(digest))
    return np.array(rows, np.uint8).reshape(-1, 1, 2)


def fake_pooled(token_ids: list[int], pooling: PoolingParams) -> np.ndarray:
    """The pooling result of the fake model: rows (token id, 1) that identify the pooled tokens."""
    rows = np.array([[token_id, 1.0] for token_id in token_ids], np.float32)
    found: np.ndarray = {"last": rows[-1], "cls": rows[0], "mean": rows.mean(0)}.get(pooling.kind, rows)
    return found


def _draw(digest: int, seed: int, vocab_size: int, banned: Collection[int]) -> int:
    first = mix(digest, seed) % vocab_size
    candidates = ((first + shift) % vocab_size for shift in range(vocab_size))
    return next((token_id for token_id in candidates if token_id not in banned), first)


def _experts(digest: int) -> list[list[int]]:
    """Two of 256 experts, in one layer."""
    return [[digest % 256, (digest % 256 + 1 + digest // 256 % 255) % 256]]


def _positions(row: ScheduledSequence) -> range:
    return range(row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens)
