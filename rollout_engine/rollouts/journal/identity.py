"""The identity of a run: everything that determines its samples, by name, as plain data."""

from collections.abc import Mapping
from typing import Any

import msgspec
import xxhash

from rollout_engine.base.errors import LifecycleError
from rollout_engine.base.lora_request import as_lora_request
from rollout_engine.base.sampling_params import SamplingParams, as_sampling_params
from rollout_engine.batches.json_values import json_value
from rollout_engine.batches.reward_functions import reward_calls
from rollout_engine.engine.verbs import VERBS
from rollout_engine.faces.frontend import Frontend
from rollout_engine.rollouts.journal.groups import GroupJournal
from rollout_engine.rollouts.journal.journal import JournalOptions
from rollout_engine.rollouts.plan import RolloutArguments

_NOT_DRAWN = {"output_kind", "n", "seed"}
"""Fields of `SamplingParams` that do not matter here, or are named separately."""
_MODEL = ("vocab_size", "eos_token_ids", "generates", "routing", "pictures")
"""Facts about the model, which every checkpoint of a training shares."""


def run_identity(
    frontend: Frontend, arguments: RolloutArguments, before: Mapping[str, Any] | None, *, draws_seed: bool
) -> dict[str, Any]:
    """Describe a run. `before`: its journal's identity, whose seed is taken if the arguments have none.

    `draws_seed`: a run without any seed gets one of the engine's.
    """
    params = as_sampling_params(arguments.sampling_params)
    seed = arguments.seed
    if seed is None and params.seed is None and draws_seed:
        seed = frontend.next_seed() if before is None else before.get("seed")
    rewards = [] if arguments.reward_fn is None else reward_calls(arguments.reward_fn, arguments.reward_weights)
    lora = arguments.lora_request
    identity = {
        "sampling_params": changed_fields(params),
        "num_samples": arguments.num_samples or params.n,
        "oversample": arguments.oversample,
        "seed": seed,
        "sampling_seed": params.seed,
        "options": {name: json_value(value) for name, value in arguments.options.items() if value is not None},
        "reward_fn": [call.name for call in rewards],
        "reward_weights": None if arguments.reward_weights is None else [*map(float, arguments.reward_weights)],
        "lora": None if lora is None else as_lora_request(lora).name,
        **describe_model(frontend),
    }
    return as_plain(identity)


def as_plain(identity: dict[str, Any]) -> dict[str, Any]:
    """The identity as a journal returns it."""
    plain: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(identity))
    return plain


def changed_fields(params: SamplingParams) -> dict[str, Any]:
    """The fields of sampling parameters that are not the default, as plain data."""
    default, names = SamplingParams(), set(params.__struct_fields__) - _NOT_DRAWN
    given = {name: getattr(params, name) for name in sorted(names) if getattr(params, name) != getattr(default, name)}
    return {name: json_value(msgspec.to_builtins(value, enc_hook=repr)) for name, value in given.items()}


def describe_model(frontend: Frontend) -> dict[str, Any]:
    """The settings of an engine that determine its bits, and a digest of its model and tokenizer without weights."""
    info, codec = frontend.client.info, frontend.inputs.codec
    facts = {name: msgspec.to_builtins(getattr(info, name), enc_hook=repr) for name in _MODEL}
    tokenizer = [] if codec is None else [len(codec.hf), sorted(codec.hf.all_special_ids)]
    content = msgspec.json.encode([facts, tokenizer], order="deterministic")
    engine = {
        "dtype": info.dtype,
        "fp32_head": info.config.fp32_head,
        "quantization": info.config.quantization,
        "deterministic": info.config.deterministic,
        "logits_processors": list(info.config.logits_processors),
    }
    return {"engine": engine, "model": xxhash.xxh3_64_hexdigest(content)}


class FrontendWeights:
    """The live weights of an engine, with the adapter that samples: a `LiveWeights`."""

    def __init__(self, frontend: Frontend, lora: str | None = None) -> None:
        """`lora`: name of the adapter."""
        self._frontend, self._lora = frontend, lora

    @property
    def version(self) -> int:
        """The live version."""
        return self._frontend.client.policy_version

    @property
    def num_updates(self) -> int:
        """Updates so far: one with `reset_version=True` may have replaced the weights of a version."""
        return self._frontend.num_updates

    def read_digest(self) -> str:
        """Digest of the live weights. Raises `LifecycleError` while they cannot be read, or without the adapter."""
        results = _call_verb(self._frontend, "collective_rpc", "get_weight_digest")
        digest = str((next(iter(results.values())) if isinstance(results, dict) else results)[0])
        if self._lora is None:
            return digest
        info = next((each for each in _call_verb(self._frontend, "list_loras") if each.name == self._lora), None)
        if info is None:
            raise LifecycleError(f"The adapter '{self._lora}' that samples was removed: add it again (add_lora).")
        return f"{digest} {info.name} {info.digest}"


def open_group_journal(
    frontend: Frontend, arguments: RolloutArguments, journal: Any
) -> tuple[GroupJournal, RolloutArguments]:
    """Open the journal of a collector, or one in memory if `journal` is None; returns the arguments with its seed.

    Raises `RequestError` for a directory that cannot be used, was altered, or holds another run.
    """
    arguments, lora = arguments.normalize(), arguments.lora_request
    weights = FrontendWeights(frontend, None if lora is None else as_lora_request(lora).name)
    options = None if journal is None else JournalOptions.of(journal)

    def make_identity(before: Mapping[str, Any] | None) -> dict[str, Any]:
        return run_identity(frontend, arguments, before, draws_seed=options is not None)

    groups = GroupJournal(options, make_identity, weights)
    return groups, msgspec.structs.replace(arguments, seed=groups.identity["seed"])


def _call_verb(frontend: Frontend, name: str, *given: Any) -> Any:
    verb = VERBS[name]
    arguments = verb.bind(given, {})
    return frontend.client.call(verb.name, arguments).wait(verb, arguments)
