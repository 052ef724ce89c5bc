"""Trains LoRA adapters of a served model on the CPU, with the engine's own arithmetic: a `LoraTrainer`.

Log-probs in training are the sampler's bit for bit. The base is loaded a second time. An adapter takes its matrices,
their gradients and two moments, all float32.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from envs_adapters.trainers.lora_layers import ALPHA, LoraLayers
from envs_adapters.trainers.lora_losses import LOSSES, TARGETS, check_examples, settings_of
from rollout_engine import exact
from rollout_engine.base.errors import RequestError
from rollout_engine.base.lora_training import AdamStep, LoraShape, LossResult, TrainingExample

_MOST_LOGITS = 1 << 26
"""Logits of one forward: more examples are computed in several, to the same bits. One example is never divided."""
_TENSORS, _CONFIG, _OPTIMIZER = "adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""The state that AdamW has of each parameter."""


class ExactLoraTrainer:
    """A `LoraTrainer` of one checkpoint. It is used on one thread."""

    def __init__(self, path: str, dtype: str, *, max_rank: int, max_tokens: int, fp32_head: bool = False) -> None:
        """Load the base as an engine of `path` and `dtype` does. Raises `ConfigError` as `exact.load`.

        `max_rank`: the largest that the engine serves. `max_tokens`: of an example.
        """
        self._model: Any = exact.load(path, dtype, fp32_head=fp32_head)
        self._path, self._max_rank, self._max_tokens = path, max_rank, max_tokens
        self._vocab_size: int = self._model.config.get_text_config().vocab_size
        self._layers = LoraLayers(self._model)
        self._adapters: dict[str, _Adapter] = {}
        self._num_made = 0

    @property
    def losses(self) -> tuple[str, ...]:
        """Names of the losses."""
        return tuple(LOSSES)

    def check_shape(self, shape: LoraShape) -> None:
        """Refuse a rank that the engine does not serve, and a choice of no layers."""
        if not 1 <= shape.rank <= self._max_rank:
            hint = "Start the server with a larger max_lora_rank=, or train a smaller rank."
            raise RequestError.for_field("lora_config.rank", shape.rank, f"in [1, {self._max_rank}]", hint)
        self._layers.linears_of(shape)

    def create(self, name: str, shape: LoraShape) -> None:
        """Make an adapter that changes nothing yet."""
        self._num_made += 1
        key = f"adapter{self._num_made}"
        self._adapters[name] = _Adapter(key, shape, self._layers.add(key, shape))

    def remove(self, name: str) -> None:
        """Free an adapter."""
        found = self._adapters.pop(name, None)
        if found is not None:
            self._layers.remove(found.key)

    def run(
        self,
        name: str,
        examples: Sequence[TrainingExample],
        loss: str,
        config: Mapping[str, float],
        *,
        forward_only: bool = False,
    ) -> LossResult:
        """Compute a loss, and add its gradients to those of the adapter unless `forward_only`."""
        adapter, settings = self._get(name), settings_of(loss, config)
        check_examples(examples, loss, vocab_size=self._vocab_size, max_tokens=self._max_tokens)
        self._layers.activate(adapter.key)
        total, logprobs = 0.0, list[Tensor]()
        for batch in _divide_examples(examples, self._vocab_size):
            with torch.set_grad_enabled(not forward_only):
                found = self._logprobs(batch)
                inputs = {each: _join_inputs(batch, each) for each in LOSSES[loss][1]}
                value = LOSSES[loss][0](found, inputs, settings)
                if not torch.isfinite(value):
                    bound = "a finite sum: the ratio of log-probs, or an input, is too large"
                    raise RequestError.for_field(f"loss of {loss}", value.item(), bound)
                if not forward_only:
                    value.backward()
            total += value.item()
            logprobs += found.detach().split([len(each.token_ids) for each in batch])
        return LossResult(total, [each.numpy() for each in logprobs])

    def _logprobs(self, batch: Sequence[TrainingExample]) -> Tensor:
        """Log-probs of the targets of examples, end to end -> float32 [tokens]."""
        ids = torch.cat([torch.from_numpy(each.token_ids) for each in batch])
        positions = torch.cat([torch.arange(len(each.token_ids)) for each in batch])
        logits = self._model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits
        return exact.logprobs_of(logits[0], _join_inputs(batch, TARGETS))

    def step(self, name: str, step: AdamStep) -> dict[str, float]:
        """Apply the gradients by AdamW and clear them -> the norm that they had."""
        adapter = self._get(name)
        parameters = list(adapter.parameters.values())
        if all(each.grad is None for each in parameters):
            what = "optim_step: there are no gradients since the last step"
            raise RequestError(f"{what}. Call forward_backward before it.", field="optim_step")
        bound = step.grad_clip_norm if step.grad_clip_norm > 0 else float("inf")
        norm = nn.utils.clip_grad_norm_(parameters, bound).item()
        for group in adapter.optimizer.param_groups:
            group.update(lr=step.learning_rate, betas=(step.beta1, step.beta2), eps=step.eps)
            group.update(weight_decay=step.weight_decay)
        adapter.optimizer.step()
        adapter.optimizer.zero_grad()
        return {"unclipped_grad_l2:mean": norm}

    def clear(self, name: str) -> None:
        """Drop the gradients."""
        self._get(name).optimizer.zero_grad()

    def save(self, name: str, directory: Path, *, optimizer: bool) -> None:
        """Write the adapter in PEFT's format, and the state of its optimizer."""
        from safetensors.torch import save_file

        adapter = self._get(name)
        save_file({key: each.detach() for key, each in adapter.parameters.items()}, directory / _TENSORS)
        config = {
            "base_model_name_or_path": self._path,
            "bias": "none",
            "lora_alpha": ALPHA,
            "peft_type": "LORA",
            "r": adapter.shape.rank,
            "target_modules": sorted({key.split(".")[-3] for key in adapter.parameters}),
            "task_type": "CAUSAL_LM",
        }
        directory.joinpath(_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        if optimizer:
            save_file(adapter.moments(), directory / _OPTIMIZER)

    def load(self, name: str, directory: Path, *, optimizer: bool) -> None:
        """Read the files of `save`; without `optimizer` its state begins anew, and gradients are dropped."""
        from safetensors.torch import load_file

        adapter = self._get(name)
        tensors = load_file(directory / _TENSORS)
        shapes = {key: list(each.shape) for key, each in adapter.parameters.items()}
        if {key: list(each.shape) for key, each in tensors.items()} != shapes:
            raise RequestError.for_field(
                "path", str(directory), "a checkpoint of an adapter of the same layers and rank"
            )
        moments = load_file(directory / _OPTIMIZER) if optimizer else {}
        with torch.no_grad():
            for key, parameter in adapter.parameters.items():
                parameter.copy_(tensors[key])
        adapter.restore(moments)

    def _get(self, name: str) -> "_Adapter":
        found = self._adapters.get(name)
        if found is None:
            raise RequestError.for_field("model_id", name, "an adapter that is in training")
        return found


class _Adapter:
    """One adapter, and its optimizer."""

    def __init__(self, key: str, shape: LoraShape, parameters: dict[str, nn.Parameter]) -> None:
        self.key, self.shape, self.parameters = key, shape, parameters
        self.optimizer = self._new_optimizer()

    def _new_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.parameters.values())

    def moments(self) -> dict[str, Tensor]:
        """The state of the optimizer by names of parameters; empty before the first step."""
        return {
            f"{key}.{moment}": state[moment].contiguous()
            for key, parameter in self.parameters.items()
            if (state := self.optimizer.state.get(parameter))
            for moment in _MOMENTS
        }

    def restore(self, moments: Mapping[str, Tensor]) -> None:
        """Begin with a state of the optimizer, and without gradients."""
        self.optimizer.zero_grad()
        self.optimizer = self._new_optimizer()
        for key, parameter in self.parameters.items():
            if f"{key}.{_MOMENTS[0]}" in moments:
                self.optimizer.state[parameter] = {moment: moments[f"{key}.{moment}"] for moment in _MOMENTS}


def _divide_examples(examples: Sequence[TrainingExample], vocab_size: int) -> Iterator[list[TrainingExample]]:
    """Divide examples, in order, among forwards."""
    batch, count = list[TrainingExample](), 0
    for example in examples:
        count += len(example.token_ids) * vocab_size
        if batch and count > _MOST_LOGITS:
            yield batch
            batch, count = [], len(example.token_ids) * vocab_size
        batch.append(example)
    yield batch


def _join_inputs(batch: Sequence[TrainingExample], name: str) -> Tensor:
    """An input of all examples, end to end."""
    return torch.cat([torch.from_numpy(each.inputs[name]) for each in batch])
