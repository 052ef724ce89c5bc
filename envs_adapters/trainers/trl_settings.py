"""TRL's version, the attributes of its trainers that are read, and their sampling settings as ours."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from envs_adapters.trainers.package import Package
from rollout_engine.base.errors import ConfigError
from rollout_engine.base.sampling_params import SamplingParams

TRL = Package("TRL", "trl", "1.16")

_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "stop_strings": "stop"}
"""transformers' names of settings that we have under another one."""
_OURS = frozenset("n seed logprobs logprobs_mode prompt_logprobs output_kind stop_token_ids ignore_eos".split())
"""Settings that this adapter sets itself."""


def require(owner: object, names: Iterable[str]) -> None:
    """Raise `ConfigError` unless `owner` has these attributes."""
    if missing := [name for name in names if not hasattr(owner, name)]:
        raise TRL.make_missing_error(f"{type(owner).__name__} has no {', '.join(missing)}")


def require_use(function: Callable[..., Any], names: Iterable[str]) -> None:
    """Raise `ConfigError` unless the source of a method of TRL's uses these names."""
    code = inspect.unwrap(function).__code__
    if missing := [name for name in names if name not in code.co_names]:
        raise TRL.make_missing_error(f"{code.co_qualname} does not use {', '.join(missing)}")


def sampling_params(trainer: Any) -> SamplingParams:
    """The settings of a `GRPOTrainer`, without `n` and `seed`.

    Log-probs are those of the distribution that was sampled from, as TRL asks of a backend. The end ids are the
    trainer's, and no others, as in TRL's own generation. Raises `ConfigError` that names a setting without equal here.
    """
    given = _generation_kwargs(trainer)
    return SamplingParams(
        **{"detokenize": bool(given.keys() & {"stop", "stop_regex"})} | _plain_settings(trainer) | given,
        stop_token_ids=list(trainer.eos_token_ids),
        ignore_eos=True,
        logprobs=0,
        logprobs_mode="processed",
    )


def _plain_settings(trainer: Any) -> dict[str, Any]:
    pattern = getattr(trainer.args, "vllm_structured_outputs_regex", None)
    return {
        "structured_outputs": None if pattern is None else {"regex": pattern},
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k or 0,
        "min_p": trainer.min_p or 0.0,
        "repetition_penalty": trainer.repetition_penalty,
        "max_tokens": trainer.max_completion_length,
    }


def _generation_kwargs(trainer: Any) -> dict[str, Any]:
    """`GRPOConfig.generation_kwargs` under our names."""
    given: dict[str, Any] = trainer.args.generation_kwargs or {}
    given = {name: value for name, value in given.items() if (name, value) != ("do_sample", True)}
    known = frozenset(SamplingParams.__struct_fields__) - _OURS
    if wrong := [name for name in given if _NAMES.get(name, name) not in known]:
        raise ConfigError(
            f"GRPOConfig(generation_kwargs={{{wrong[0]!r}: {given[wrong[0]]!r}}}) has no equal in this engine, which "
            f"takes fields of SamplingParams ({', '.join(sorted(known))}) and {', '.join(sorted(_NAMES))}."
        )
    return {_NAMES.get(name, name): value for name, value in given.items()}
