"""One forward of a Hugging Face module over paged KV on the CPU: chunks in; logits or hidden states of rows out."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout_engine.kernels.adapters import AdapterRows
from rollout_engine.model.cpu.adapters import CpuAdapterPool
from rollout_engine.model.cpu.attention import CpuKVPool
from rollout_engine.model.cpu.decoder import CpuDecoder
from rollout_engine.model.cpu.flat_batch import FlatBatch, SequenceChunk
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.heads import trunk_of
from rollout_engine.model.modules.layer_watch import LayerWatch
from rollout_engine.model.modules.routers import recording, routers_of
from rollout_engine.model.pictures.step_inputs import PictureInputs, module_inputs
from rollout_engine.model.ranks.cut import ModelCut
from rollout_engine.model.ranks.stages import Stage
from rollout_engine.model.sampling.logit_rows import LogitRows
from rollout_engine.model.sampling.module_logits import module_logits


class CpuModel:
    """A module built with `ATTENTION_NAME`, and its pools of KV and of states.

    `compiled`: its layers run as one C++ call instead of as modules, unless `layer_watch` has watchers;
    `decoder_trial` must have allowed it. `adapters`: those that rows may have. `cut`: how it is cut over ranks, which
    then compute every forward together, or, if it has a stage, each its own layers.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        geometry: Sequence[LayerGeometry],
        *,
        num_blocks: int,
        block_size: int,
        num_state_slots: int = 0,
        compiled: bool = False,
        adapters: CpuAdapterPool | None = None,
        cut: ModelCut | None = None,
    ) -> None:
        dtype = next(module.parameters()).dtype
        self.module, self.adapters = module, adapters
        sizes = dict(num_blocks=num_blocks, block_size=block_size, num_state_slots=num_state_slots)
        self.kv = CpuKVPool(geometry, **sizes, dtype=dtype)
        self.decoder = None
        self.stage: Stage | None = None if cut is None else cut.stage
        """The stage of a module that is divided."""
        self._pipe = None if self.stage is None else self.stage.pipe
        if compiled:
            within = cut if cut is not None and cut.is_tensor_parallel else None
            own = self.kv.layers, adapters, within, self.kv.states.layers
            self.decoder = CpuDecoder(module, geometry, *own, pipe=self._pipe)
        self.layer_watch = LayerWatch(module, len(geometry))
        self.routers = routers_of(module)
        self._recorded: list[Tensor] | None = None
        """Routed experts of the forwards inside `recording`; None outside of it."""
        self._chosen: list[Tensor | None] = []
        """Choices of routers that ran as modules there."""

    @property
    def passes_on(self) -> bool:
        """Whether another stage computes the rest of each forward, and the logits."""
        return self._pipe is not None and not self._pipe.is_last

    def forward(
        self,
        chunks: FlatBatch | Sequence[SequenceChunk],
        logit_rows: np.ndarray | Sequence[int],
        pictures: PictureInputs | None = None,
    ) -> Tensor:
        """Compute `chunks`, writing their KV; return logits [len(logit_rows), V] of these rows of the flat batch.

        `pictures`: the inputs that the pictures of its sequences add.
        """
        return self.forward_states(chunks, logit_rows, (), pictures=pictures)[0].take(slice(None))

    @torch.inference_mode()
    def forward_rows(
        self,
        chunks: FlatBatch | Sequence[SequenceChunk],
        logit_rows: np.ndarray | Sequence[int],
        adapter_rows: AdapterRows | None = None,
    ) -> LogitRows:
        """Do as `forward`; the logits of many rows are left to be computed as they are taken, before the next step.

        `adapter_rows`: the rows that have an adapter of `adapters`.
        """
        return self.forward_states(chunks, logit_rows, (), adapter_rows)[0]

    @torch.inference_mode()
    def forward_states(
        self,
        chunks: FlatBatch | Sequence[SequenceChunk],
        logit_rows: np.ndarray | Sequence[int],
        state_rows: np.ndarray | Sequence[int],
        adapter_rows: AdapterRows | None = None,
        pictures: PictureInputs | None = None,
    ) -> tuple[LogitRows, Tensor]:
        """Do as `forward_rows`; return also the hidden states [n, H] of `state_rows`, behind the final norm.

        A module without an output head has no logits. A stage that is not the last has none either, and its states are
        those of all rows, which go to the next one, behind its own last layer.
        """
        batch = chunks if isinstance(chunks, FlatBatch) else FlatBatch.of(chunks)
        if self.passes_on:
            states = self.pass_on(batch, adapter_rows)
            return LogitRows.of(states[:, :0]), states
        token_ids, positions = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions)
        rows, of_states = (torch.from_numpy(np.asarray(each, np.int64)) for each in (logit_rows, state_rows))
        has_features = pictures is not None and len(pictures.rows) > 0
        if self.decoder is not None and not self.layer_watch.num_watchers and not has_features:
            routed = self._room_for_experts(len(token_ids))
            given = token_ids, positions, self.kv.plan(batch), rows, of_states
            axes = None if pictures is None else pictures.positions
            return self.decoder.forward(*given, adapter_rows, routed, axes, batch.states)
        inputs: dict[str, Any] = {"input_ids": token_ids[None], "position_ids": positions[None]}
        if pictures is not None:
            inputs = module_inputs(self.module, token_ids, positions, pictures)
            batch = batch._replace(reach=pictures.reach)
        if trunk_of(self.module) is not self.module:
            with self.kv.step(batch), self.adapting(adapter_rows):
                output = self.module.base_model(**inputs, use_cache=False)
            states = output.last_hidden_state[0, of_states]
            return LogitRows.of(states[:0]), states

        def forward(rows: Tensor) -> Any:
            with self.kv.step(batch), self.adapting(adapter_rows):
                return self.module(**inputs, use_cache=False, logits_to_keep=rows)

        with _last_states(self.module, wanted=len(of_states) > 0) as found:
            logits = module_logits(self.module, forward, rows, self.module.config.vocab_size, may_repeat=True)
        return logits, found[0][of_states] if found else torch.empty(0)

    @torch.inference_mode()
    def pass_on(self, batch: FlatBatch, adapter_rows: AdapterRows | None = None) -> Tensor:
        """Compute this stage's layers, and pass their hidden states [T, H] on to the next stage; returns them."""
        pipe = self._pipe
        assert pipe is not None, "one process has all layers"
        token_ids, positions = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions)
        if self.decoder is not None:
            routed = self._room_for_experts(len(token_ids))
            given = token_ids, positions, self.kv.plan(batch), adapter_rows, routed
            states = self.decoder.forward_stage(*given, batch.states)
        else:
            with self.kv.step(batch), self.adapting(adapter_rows), pipe.holding():
                self.module.base_model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
            assert pipe.left is not None, "its last layer was run"
            states, routed = pipe.left, self._experts_of_modules()
        pipe.leave(states, self._join_experts(routed))
        return states

    def _join_experts(self, own: Tensor | None) -> Tensor | None:
        """Routed experts of the layers up to this stage's last, of which `own` [T, l, k] are this stage's own.

        None if neither this stage nor one before has recorded any.
        """
        parts = [] if own is None else [own.int()]
        if self._pipe is not None and (came := self._pipe.came) is not None:
            assert self.stage is not None and self.stage.routing is not None, "what is recorded was checked"
            self._pipe.came = None
            parts.insert(0, came.view(-1, self.stage.first_router, self.stage.routing.top_k))
        return torch.cat(parts, 1) if parts else None

    def adapting(self, rows: AdapterRows | None) -> AbstractContextManager[None]:
        """Inside, products of the module get the adapters of `rows`."""
        return nullcontext() if self.adapters is None or rows is None else self.adapters.active(rows)

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Inside, record the experts that a forward sends its T tokens to: integers [T, number of routers, k]."""
        found: list[Tensor] = []
        self._recorded = found
        try:
            with recording(self.routers) as self._chosen:
                yield found
                own = found[-1] if found else self._experts_of_modules()
        finally:
            self._recorded, self._chosen = None, []
        if (joined := self._join_experts(own)) is not None:
            found[:] = [joined]

    def _room_for_experts(self, num_tokens: int) -> Tensor | None:
        if self._recorded is None or not self.routers:
            return None
        router: Any = self.routers[0]
        self._recorded.append(torch.empty(num_tokens, len(self.routers), router.top_k, dtype=torch.int32))
        return self._recorded[-1]

    def _experts_of_modules(self) -> Tensor | None:
        """The experts [T, l, k] that routers have chosen as modules, inside `recording`; None: there are none."""
        chosen = [experts for experts in self._chosen if experts is not None]
        return torch.stack(chosen, 1) if chosen else None


@contextmanager
def _last_states(module: PreTrainedModel, *, wanted: bool) -> Iterator[list[Tensor]]:
    """Record the hidden states [T, H] that the base model of a causal LM returns, at each of its calls."""
    found: list[Tensor] = []
    if not wanted:
        yield found
        return
    hook = module.base_model.register_forward_hook(lambda _, given, out: found.append(out.last_hidden_state[0]))
    try:
        yield found
    finally:
        hook.remove()
