"""The draft model at work: its weights, its KV pool, its steps, and what these cost."""

import msgspec
import torch

from rollout_engine.config import EngineConfig
from rollout_engine.errors import ConfigError, DirtyWeightsError, refused
from rollout_engine.execution.resident_weights import ResidentWeights
from rollout_engine.execution.step_costs import measure_steps
from rollout_engine.locations import find_directory
from rollout_engine.messages import ModelRunnerOutput, SchedulerOutput
from rollout_engine.model.backend import Backend
from rollout_engine.model.cpu.backend import CpuBackend
from rollout_engine.model.kv_size import bytes_per_block, cap_model_len
from rollout_engine.model.loading.loader import load_model
from rollout_engine.model.loading.vocabulary import first_difference
from rollout_engine.model.modules.loaded_model import LoadedModel
from rollout_engine.speculation_config import DraftInfo

_SHARE_OF_POOL = 8
"""The draft model's KV pool has this part of the bytes of the policy's."""
_LEAST_BLOCKS = 2


class DraftWorker:
    """The model that `SpeculationConfig.draft_model` names, on the CPU, by the policy's own kernels.

    Its rows need not be independent, since nothing of it is seen but drafts; where its linears allow it, they are.
    """

    def __init__(self, config: EngineConfig, policy: LoadedModel, policy_backend: Backend) -> None:
        """Raises `ConfigError` for a model that cannot be loaded or served, or has another vocabulary."""
        speculation = config.speculates
        assert speculation is not None and speculation.draft_model is not None, "a draft model is configured"
        self.name = speculation.draft_model
        own = msgspec.structs.replace(
            config, model=self.name, tokenizer=None, deterministic="auto", fp32_head=False, speculation="off",
            tensor_parallel_size=1, quantization=None, max_model_len=None, kv_cache_bytes=None, num_kv_blocks=None,
            load_format="dummy" if config.load_format == "dummy" else "auto",
        )  # fmt: skip
        try:
            loaded = load_model(own)
        except ConfigError as problem:
            raise ConfigError(f"speculation.draft_model: {problem}") from None
        self._check_vocabulary(config, loaded, policy)
        num_blocks = _num_blocks(config, speculation.draft_kv_cache_bytes, loaded, policy, policy_backend.num_blocks)
        backend = CpuBackend(msgspec.structs.replace(own, num_kv_blocks=num_blocks), loaded, ())
        self._runner = backend.runner
        self._weights = ResidentWeights(loaded, backend, torch.device("cpu"))
        self.updater = self._weights.updater
        self.info = DraftInfo(
            num_blocks=num_blocks,
            max_model_len=cap_model_len(own, loaded.max_model_len, num_blocks),
            step_seconds=measure_steps(self._runner.execute, min(num_blocks, config.max_num_batched_tokens)),
        )
        self.choices = f"draft model {type(loaded.module).__name__} from {self.name}: {backend.choices}"

    def execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step. Raises `DirtyWeightsError` while the weights are incomplete or forgotten."""
        if self.updater.dirty and work.scheduled:
            raise DirtyWeightsError.for_verb("a step of the draft model", forgotten=self.updater.forgotten)
        output: ModelRunnerOutput = self._runner.execute(work)
        return output

    def release_kv(self) -> None:
        """Give the memory of all KV back to the system."""
        self._runner.model.kv.release()

    def release_weights(self, *, forget: bool) -> None:
        """Free copies of weights and the shadow of updates; `forget`: free the weights and lose their values."""
        self._weights.release(forget=forget)

    def restore_weights(self) -> None:
        """Undo `release_weights(forget=False)`."""
        if not self.updater.forgotten:
            self._weights.restore()

    @property
    def num_resident_bytes(self) -> int:
        """Bytes of weights, of copies of them, and of KV that take memory now."""
        kv: int = self._runner.model.kv.num_resident_bytes
        return self._weights.num_bytes + self.updater.num_resident_bytes + kv

    def _check_vocabulary(self, config: EngineConfig, loaded: LoadedModel, policy: LoadedModel) -> None:
        what = f"speculation.draft_model={self.name!r} cannot draft for {config.model!r}"
        advice = "Give a causal LM with the same tokenizer, such as a smaller one of its family."
        if loaded.head_kind is not None:
            raise ConfigError(f"{what}: it classifies, and has no output head. {advice}")
        if loaded.vocab_size != policy.vocab_size:
            sizes = f"its vocabulary has {loaded.vocab_size} tokens, the model's {policy.vocab_size}"
            raise ConfigError(f"{what}: {sizes}. {advice}")
        ours = find_directory(config.tokenizer or config.model, weights=False)
        difference = first_difference(find_directory(self.name, weights=False), ours)
        if difference is not None:
            raise ConfigError(f"{what}: {difference}. {advice}")


def _num_blocks(
    config: EngineConfig, given: int | None, loaded: LoadedModel, policy: LoadedModel, policy_blocks: int
) -> int:
    """KV blocks of the draft model: as many as `given` bytes hold, or the default."""
    size, block_size = bytes_per_block(loaded, config.tokens_per_block), config.tokens_per_block
    if given is not None:
        if given < _LEAST_BLOCKS * size:
            bound = f"{_LEAST_BLOCKS * size} or more: two KV blocks of {block_size} tokens"
            raise ConfigError(refused("speculation.draft_kv_cache_bytes", given, bound))
        return min(given // size, max(policy_blocks, _LEAST_BLOCKS))
    share = bytes_per_block(policy, block_size) * policy_blocks // _SHARE_OF_POOL // size
    longest = -(-cap_model_len(config, policy.max_model_len, policy_blocks) // block_size)
    return max(min(max(share, longest), policy_blocks), _LEAST_BLOCKS)
