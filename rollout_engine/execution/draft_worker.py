"""The draft model at work: its weights, its KV pool, its steps, and their costs."""

from collections.abc import Callable

import msgspec

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, DirtyWeightsError, refused
from rollout_engine.base.locations import find_directory
from rollout_engine.base.messages import ModelRunnerOutput, SchedulerOutput
from rollout_engine.base.speculation_config import DraftInfo
from rollout_engine.execution.resident_weights import ResidentWeights
from rollout_engine.execution.step_costs import measure_steps
from rollout_engine.model.backend import Backend
from rollout_engine.model.backends import Device
from rollout_engine.model.kv_size import DRAFT_SHARE, bytes_per_block, cap_model_len
from rollout_engine.model.loading.loader import load_model
from rollout_engine.model.loading.vocabulary import first_difference
from rollout_engine.model.modules.geometry import keeps_states
from rollout_engine.model.modules.loaded_model import LoadedModel

_LEAST_BLOCKS = 2


class DraftWorker:
    """The model that `SpeculationConfig.draft_model` names, on the policy's device, by the policy's own kernels.

    Its rows need not be independent, since only its drafts are seen; on a CPU they are if its linears allow
    it, on a device they are not.
    """

    def __init__(
        self, config: EngineConfig, loaded: LoadedModel, device: Device, policy: LoadedModel, policy_backend: Backend
    ) -> None:
        """`loaded`: by `load_draft`. Raises `ConfigError` for a model of another vocabulary, or one not served."""
        speculation, own = config.speculates, _own_config(config)
        assert speculation is not None, "a draft model is configured"
        self.name = own.model
        self._check_vocabulary(config, loaded, policy)
        num_blocks = _num_blocks(config, speculation.draft_kv_cache_bytes, loaded, policy, policy_backend.num_blocks)
        backend = device.backend(msgspec.structs.replace(own, num_kv_blocks=num_blocks), loaded, ())
        self._runner = runner = backend.runner
        self._run: Callable[[SchedulerOutput], ModelRunnerOutput]
        max_rows = min(num_blocks, config.max_num_batched_tokens)
        if backend.runs_ahead:
            self._run, max_rows = (lambda work: runner.submit(work)()), min(max_rows, config.max_num_seqs)
        else:
            self._run = runner.execute
        self._weights = ResidentWeights(loaded, backend, device.torch_device)
        self.updater = self._weights.updater
        self.info = DraftInfo(
            num_blocks=num_blocks,
            max_model_len=cap_model_len(own, loaded.max_model_len, num_blocks),
            step_seconds=measure_steps(self._run, max_rows),
        )
        self.choices = f"draft model {type(loaded.module).__name__} from {self.name}: {backend.choices}"

    def execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step. Raises `DirtyWeightsError` while the weights are incomplete or forgotten."""
        if self.updater.dirty and work.scheduled:
            raise DirtyWeightsError.for_verb("a step of the draft model", forgotten=self.updater.forgotten)
        return self._run(work)

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


def load_draft(config: EngineConfig, device: Device) -> LoadedModel | None:
    """The weights of the draft model that `config` names, on the policy's device; None if it names none.

    On a device they are loaded before the policy's KV pool takes what is left. Raises `ConfigError`.
    """
    if config.speculates is None or config.speculates.draft_model is None:
        return None
    try:
        loaded = load_model(_own_config(config), device.torch_device)
    except ConfigError as problem:
        raise ConfigError(f"speculation.draft_model: {problem}") from None
    if keeps_states(loaded.geometry):
        raise ConfigError(
            f"speculation.draft_model={config.speculates.draft_model!r} has layers that keep a state, and these do not "
            "draft yet. Give a model that attends in every layer, or leave it out: drafts of other sources need none."
        )
    return loaded


def _own_config(config: EngineConfig) -> EngineConfig:
    """The draft model's configuration."""
    speculation = config.speculates
    assert speculation is not None and speculation.draft_model is not None, "a draft model is configured"
    return msgspec.structs.replace(
        config, model=speculation.draft_model, tokenizer=None, deterministic="auto", fp32_head=False, speculation="off",
        tensor_parallel_size=1, executor="auto", quantization=None, max_model_len=None, kv_cache_bytes=None,
        num_kv_blocks=None, state_cache_bytes=None, load_format="dummy" if config.load_format == "dummy" else "auto",
        max_prompt_pictures=0,
    )  # fmt: skip


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
    share = bytes_per_block(policy, block_size) * policy_blocks // DRAFT_SHARE // size
    longest = -(-cap_model_len(config, policy.max_model_len, policy_blocks) // block_size)
    return max(min(max(share, longest), policy_blocks), _LEAST_BLOCKS)
