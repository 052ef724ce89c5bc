"""TorchRL's collectors and losses with completions of this engine.

    policy = EnginePolicy(RolloutPolicy.from_pretrained(path, dtype="float32"), generate_kwargs={"max_new_tokens": 64})
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=32)
    sync = EngineWeightSyncScheme(policy)
    sync.init_on_sender(model_id="policy", context=collector, model=trained)
    sync.connect()
    for batch in collector:
        ...  # MCAdvantage, GRPOLoss and an optimizer step
        sync.send()

Pickled, an `EnginePolicy` and an `EngineWeightSyncScheme` are the address of the engine, at which they connect again.
`ExactTransformersWrapper` computes the trained model's log-probs bit for bit as the engine does.
"""

import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

from envs_adapters.trainers.torchrl_connection import Connection, Engine
from envs_adapters.trainers.torchrl_settings import TORCHRL, sampling_params
from rollout_engine.base.errors import ConfigError, refused
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.seeds import mix
from rollout_engine.rollouts.policy import RolloutPolicy

try:
    from tensordict import TensorDictBase, lazy_stack
    from torchrl.modules.llm import LLMWrapperBase
except ImportError as problem:
    raise TORCHRL.missing() from problem

from envs_adapters.trainers.torchrl_exact import ExactTransformersWrapper
from envs_adapters.trainers.torchrl_prompts import MODES, InputMode, Prompt, PromptReader, pad_token_id
from envs_adapters.trainers.torchrl_rows import Keys, Sample, Widths, row_of, samples_of, stack_rows
from envs_adapters.trainers.torchrl_weights import EngineWeightSyncScheme

__all__ = ["EnginePolicy", "EngineWeightSyncScheme", "ExactTransformersWrapper"]

_INPLACE = (True, False, "empty", None)
_NO_OPTIONS = ("self", "__class__", "engine", "key_file")
"""Locals of the constructor other than the options that a copy takes over."""


class EnginePolicy(LLMWrapperBase):  # type: ignore[misc]  # TorchRL has no types
    """A policy of TorchRL's that generates by an engine of ours; for the `policy` of an `LLMCollector`.

    It reads ("history", "prompt"), ("text", "prompt") or ("tokens", "prompt"), by `input_mode`, and writes the
    containers of TorchRL's own wrappers, without padding unless `pad_output`:

        "tokens"                prompt, response and full, int64
        "masks"                 all_attention_mask and all_assistant_mask, bool, in the shape of full; the second is
                                True at tokens that this call sampled
        "log_probs"             response and full, float32; NaN for prompt tokens, which GRPOLoss leaves out
        "text"                  prompt, response and full, except in "tokens" mode
        "history"               prompt, response and full, in "history" mode
        "versions"              full, int64: the version of the weights that sampled a token, -1 for prompt tokens

    Equal prompts of one call are one group: computed once, sampled independently. Any thread may call the policy; the
    engine batches concurrent calls, so there are no batching options.

    Pickled, it is the address of the engine, the path of the key file and its options, never weights or sockets; it
    connects when it is unpickled. Over an engine of this process it refuses, with `ConfigError`.
    """

    generate = True
    layout = None
    _min_batch_size = _max_batch_size = _batching_lock = _batching_timeout = None

    def __init__(
        self,
        engine: Engine | Connection,
        *,
        key_file: str | os.PathLike[str] | None = None,
        input_mode: InputMode = "history",
        input_key: Any = None,
        generate_kwargs: Mapping[str, Any] | None = None,
        num_samples: int | None = None,
        pad_output: bool = False,
        inplace: bool | Literal["empty"] | None = None,
        device: Any = None,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        history_key: Any = "history",
        text_key: Any = "text",
        tokens_key: Any = "tokens",
        masks_key: Any = "masks",
        log_probs_key: Any = "log_probs",
        versions_key: Any = "versions",
        prefer_tokens: bool = False,
        seed: int | None = None,
    ) -> None:
        """
        Args:
            engine: a `RolloutPolicy`, an engine, or the address of one, as `AsyncLLM.connect` takes it.
            key_file: of an engine on TCP.
            generate_kwargs: names of TorchRL's (`max_new_tokens`, `stop_sequences`, ...) or of `SamplingParams`.
            num_samples: samples per row; the result is then [*batch, num_samples]. None: one, and no such dimension.
                Environments want None, and repeat their prompts instead.
            inplace: as in TorchRL's wrappers: True (the default) writes into the input, "empty" into an empty copy of
                it, False (the default with num_samples) returns only the new entries.
            device: device of the result; None: the CPU.
            prefer_tokens: take ("tokens", "prompt") if there is one, instead of rendering the history again.
            seed: runs with the same one, in one process, draw the same. None: seeds of the engine's own.

        The chat template is the one that TorchRL's `History` chooses, unless it is named. Raises `ConfigError`, and
        whatever `AsyncLLM.connect` raises.
        """
        super().__init__()
        TORCHRL.check()
        self._options = {name: value for name, value in locals().items() if name not in _NO_OPTIONS}
        self.connection = engine if isinstance(engine, Connection) else Connection(engine, key_file)
        if input_mode not in MODES:
            raise ConfigError(refused("input_mode", input_mode, " or ".join(map(repr, MODES))))
        self.input_mode, self.input_key = input_mode, (input_mode, "prompt") if input_key is None else input_key
        if pad_output and (prefer_tokens or input_mode == "tokens"):
            raise ConfigError("pad_output=True pads what the next turn reads as tokens of its prompt. Leave it out.")
        self.generate_kwargs = dict(generate_kwargs or {})
        self._params = sampling_params(self.generate_kwargs)
        self.num_samples = _reconcile_counts(num_samples, self._params.n)
        self.inplace = _checked_inplace(inplace, self.num_samples)
        self.pad_output, self.device, self._seed, self._calls = pad_output, device, seed, itertools.count()
        self.history_key, self.text_key, self.tokens_key = history_key, text_key, tokens_key
        self.masks_key, self.log_probs_key, self.versions_key = masks_key, log_probs_key, versions_key
        self._keys = Keys.of(input_mode, self._options)
        self.in_keys, self.out_keys = [self.input_key], [key for key in self._keys if key is not None]
        self._reader = PromptReader(self.input_key, self._options, lambda: self.tokenizer)

    @property
    def model(self) -> RolloutPolicy:
        """The policy that generates."""
        return self.connection.policy

    @property
    def tokenizer(self) -> Any:
        """The engine's tokenizer. Raises `LifecycleError` if it has none."""
        return self.model.tokenizer

    def get_new_version(self, **options: Any) -> Self:
        """A policy over the same engine with other options, named as in the constructor."""
        if not options.pop("generate", True):
            raise ConfigError(
                "EnginePolicy generates, and generate=False asks for log-probs of given tokens: TorchRL's "
                "TransformersWrapper over the trained model computes those, and RolloutPolicy.score the engine's."
            )
        return type(self)(self.connection, **(self._options | options))

    def close(self) -> None:
        """End the connection if it was made for this policy; an engine that was given continues."""
        self.connection.close()

    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        tensordict_out: TensorDictBase | None = None,
        logits_only: bool = False,
        **generate_kwargs: Any,
    ) -> TensorDictBase:
        """Sample one response per row, or `num_samples`; `generate_kwargs` of this call override those of the policy.

        Raises `ConfigError` for unsupported inputs, and all errors of `RolloutPolicy.rollout`.
        """
        if logits_only:
            raise ConfigError("EnginePolicy samples and has no logits: call it without logits_only.")
        if not tensordict.ndim:
            return self.forward(lazy_stack([tensordict]), **generate_kwargs)[0]
        rows = tensordict.reshape(-1) if tensordict.ndim > 1 else tensordict
        prompts = self._reader.read(rows)
        samples = self._sample(prompts, self._params_with(generate_kwargs))
        shape = (*tensordict.shape, *(() if self.num_samples is None else (self.num_samples,)))
        result = self._containers(samples, prompts, shape)
        if tensordict_out is None and self.inplace is not False:
            tensordict_out = tensordict if self.inplace is True else tensordict.empty()
        if tensordict_out is None:
            return result
        return tensordict_out.exclude(*self.out_keys, inplace=True).update(result, keys_to_update=self.out_keys)

    def _params_with(self, generate_kwargs: Mapping[str, Any]) -> SamplingParams:
        if not generate_kwargs:
            return self._params
        params = sampling_params(self.generate_kwargs, generate_kwargs)
        if params.n != self._params.n:
            raise ConfigError("num_return_sequences gives the result its shape: set it when the policy is made.")
        return params

    def _sample(self, prompts: list[Prompt], params: SamplingParams) -> list[Sample]:
        """The samples of the first row, then those of the next."""
        groups: dict[str | tuple[int, ...], list[int]] = {}
        for place, prompt in enumerate(prompts):
            groups.setdefault(prompt.content, []).append(place)
        each = self.num_samples or 1
        batch = self.model.rollout(
            [content if isinstance(content, str) else {"prompt_token_ids": list(content)} for content in groups],
            [params.clone(n=len(places) * each) for places in groups.values()],
            seed=None if self._seed is None else mix(self._seed, next(self._calls)),
            use_tqdm=False,
        )
        found = iter(samples_of(batch))
        samples = {place: list(itertools.islice(found, each)) for places in groups.values() for place in places}
        return [sample for place in range(len(prompts)) for sample in samples[place]]

    def _containers(self, samples: list[Sample], prompts: list[Prompt], shape: tuple[int, ...]) -> TensorDictBase:
        widths = Widths.of(samples, pad_token_id(self.tokenizer)) if self.pad_output else None
        each = self.num_samples or 1
        rows = [row_of(sample, prompts[i // each], self._keys, widths) for i, sample in enumerate(samples)]
        result = stack_rows(rows, shape)
        return result if self.device is None else result.to(self.device)

    def __reduce__(self) -> tuple[Callable[..., "EnginePolicy"], tuple[Any, ...]]:
        if self._seed is not None:
            raise ConfigError(
                f"A policy with seed={self._seed} cannot be pickled: its copies would all draw the same samples. Leave "
                "the seed out, or give the collector a policy_factory that makes each policy with a seed of its own."
            )
        return _rebuild_policy, (type(self), self.connection, self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.get_new_version()


def _rebuild_policy(kind: type[EnginePolicy], connection: Connection, options: dict[str, Any]) -> EnginePolicy:
    return kind(connection, **options)


def _reconcile_counts(num_samples: int | None, n: int) -> int | None:
    if num_samples is not None and num_samples < 1:
        raise ConfigError(refused("num_samples", num_samples, "at least 1"))
    if n == 1 or num_samples == n:
        return num_samples
    if num_samples is None:
        return n
    raise ConfigError(f"num_samples={num_samples} and generate_kwargs' num_return_sequences={n} differ. Leave one out.")


def _checked_inplace(inplace: Any, num_samples: int | None) -> Any:
    if inplace not in _INPLACE:
        raise ConfigError(refused("inplace", inplace, "True, False, 'empty' or None"))
    if num_samples is not None and inplace not in (False, None):
        raise ConfigError(refused("inplace", inplace, "False or None with num_samples: the result has one more axis"))
    return num_samples is None if inplace is None else inplace
