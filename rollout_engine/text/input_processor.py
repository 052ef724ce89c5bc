"""Turns any prompt and its `SamplingParams` into one `EngineCoreRequest`; every bound is checked here."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import RequestError
from rollout_engine.base.hidden_states import check_hidden_asked
from rollout_engine.base.lora_request import as_lora_request
from rollout_engine.base.messages import EngineCoreRequest
from rollout_engine.base.pictures import PictureInfo, PlacedPicture
from rollout_engine.base.pooling_params import PoolingInfo, PoolingParams, check_generation
from rollout_engine.base.routed_experts import RoutingInfo, check_routing_asked
from rollout_engine.base.sampling_params import (
    MAX_LOGPROBS,
    TOKEN_ID_PARAMETERS,
    SamplingLike,
    SamplingParams,
    as_sampling_params,
)
from rollout_engine.base.seeds import mix, unsigned
from rollout_engine.base.structs import plain
from rollout_engine.base.support import check_num_support_ids, check_support_asked
from rollout_engine.base.thinking import Thinking
from rollout_engine.grammars.tokenizer_file import serialize_tokenizer
from rollout_engine.grammars.trials import GrammarTrials
from rollout_engine.text.default_params import read_default_params
from rollout_engine.text.picture_parts import holds_pictures
from rollout_engine.text.picture_processor import ReadPicture
from rollout_engine.text.picture_prompts import PicturePrompts, images_in, refuse_pictures
from rollout_engine.text.pooled_prompt import NOTHING_SAMPLED, closed_conversation, pooled_tokens
from rollout_engine.text.prompt_encoder import PromptEncoder
from rollout_engine.text.prompt_room import resolve_max_tokens
from rollout_engine.text.prompts import Prompt, as_batch, as_fields, as_token_ids
from rollout_engine.text.thinking_tags import ThinkingTags
from rollout_engine.text.tokenizer import TextCodec
from rollout_engine.text.vocabulary_fit import end_ids, warn_of_larger_tokenizer

logger = logging.getLogger("rollout_engine")

Params: TypeAlias = SamplingLike | PoolingParams
"""Settings of a request that samples, or of one that pools its prompt."""


class ModelSizes(Protocol):
    """Sizes of a loaded model that limit its requests."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> list[int]: ...
    @property
    def generates(self) -> bool: ...
    @property
    def pooling(self) -> PoolingInfo | None: ...
    @property
    def routing(self) -> RoutingInfo | None: ...
    @property
    def pictures(self) -> PictureInfo | None: ...


class CheckedPrompt(NamedTuple):
    """A prompt that passed all checks, with its params; not yet queued."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    cache_salt: str
    bad_words: list[list[int]]
    pooling: PoolingParams | None = None
    lora: str = ""
    """Name of the adapter; "" for none."""
    pictures: Sequence[PlacedPicture] = ()
    thinking: Thinking | None = None


class InputProcessor:
    """Checks prompts (`check`, `check_batch`) and turns them into requests (`admit`), which alone draw seeds."""

    def __init__(
        self,
        codec: TextCodec | None,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
        takes_extra_args: bool = False,
        clamps: bool = False,
        gives_id_logprobs: bool = True,
        default_params: Callable[[], SamplingParams] = SamplingParams,
        first_sequence_id: int = 0,
        generates: bool = True,
        pooling: PoolingInfo | None = None,
        routing: RoutingInfo | None = None,
        pictures: PicturePrompts | None = None,
    ) -> None:
        """`first_sequence_id`: id of the first admitted sequence; the others count up from it.

        `pictures`: None: the model takes none.
        """
        self.codec = codec
        """None with `skip_tokenizer_init`: all prompts are token ids."""
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._generates, self._pooling, self._routing = generates, pooling, routing
        self.pictures = pictures or PicturePrompts(codec, None)
        self._encoder = PromptEncoder(codec, self.pictures, max_model_len=max_model_len, vocab_size=vocab_size)
        self.thinking_tags = ThinkingTags(codec, vocab_size)
        self.eos_token_ids = list(eos_token_ids)
        """Ids that end sequences."""
        self._seed = seed
        self._takes_extra_args = takes_extra_args
        """Whether the engine has logits processors, which may read `extra_args`."""
        self._gives_id_logprobs = gives_id_logprobs
        """Whether the engine's sampler returns supports, and log-probs of given token ids, as the CPU's does."""
        self._clamps = clamps
        """Whether a `max_tokens` that does not fit is shortened instead of refused."""
        self.default_params = default_params
        """Reads the sampling settings that the checkpoint recommends."""
        self._trials = GrammarTrials(lambda: serialize_tokenizer(codec.hf) if codec else "", vocab_size, eos_token_ids)
        self.close: Callable[[], object] = self._trials.close
        """Ends the process that tries grammars."""
        self._prepared: tuple[SamplingParams, SamplingParams, list[list[int]]] | None = None
        self._num_admitted = 0
        self._next_sequence_id = first_sequence_id

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        codec: TextCodec | None,
        sizes: ModelSizes,
        *,
        seed: int | None = None,
        first_sequence_id: int = 0,
    ) -> Self:
        """Make the processor of one engine. `seed`: the root of its requests' seeds; None: the config's.

        The end ids of the checkpoint and the tokenizer's end token end sequences; a warning is logged if they differ,
        and for a tokenizer that is larger than the vocabulary.
        """
        if codec is not None:
            warn_of_larger_tokenizer(codec, sizes.vocab_size)
        return cls(
            codec,
            max_model_len=sizes.max_model_len,
            vocab_size=sizes.vocab_size,
            eos_token_ids=end_ids(sizes.eos_token_ids, codec, sizes.vocab_size),
            seed=config.seed if seed is None else seed,
            takes_extra_args=bool(config.logits_processors),
            clamps=config.on_long == "clamp",
            gives_id_logprobs=config.device != "cuda",
            default_params=partial(read_default_params, config.model),
            first_sequence_id=first_sequence_id,
            generates=sizes.generates,
            pooling=sizes.pooling,
            routing=sizes.routing,
            pictures=PicturePrompts.from_config(config, codec, sizes.pictures),
        )

    def check_batch(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None
    ) -> list[CheckedPrompt]:
        """Check one prompt or a list of them, with one params or one each. Raises `RequestError` naming the index."""
        batch = as_batch(prompts)
        if not isinstance(params, list | tuple | PoolingParams):
            params = as_sampling_params(params)
        name, kind = ("pooling_params", "PoolingParams") if _pools(params) else ("sampling_params", "SamplingParams")
        each = one_each(name, params, 1 if batch is None else len(batch), f"one {kind}")
        if batch is None:
            return [self.check(prompts, each[0])]
        checked = [self._check_at(i, prompt, each[i]) for i, prompt in enumerate(batch)]
        self._log_clamped(checked)
        return checked

    def check(self, prompt: Any, params: Params | None) -> CheckedPrompt:
        """Raise `RequestError` unless this prompt can be served with `params` (a dict of them; None: the defaults)."""
        checked = self._check(prompt, params)
        self._log_clamped([checked])
        return checked

    def has_new_rules(self, params: Params | None) -> bool:
        """Whether `check` would try a grammar, or read all tokens for tags, first, which takes its time."""
        read = params.get if isinstance(params, dict) else partial(getattr, params)
        given, budget = read("structured_outputs", None), read("thinking_budget", None)
        tags = [read(name, getattr(NOTHING_SAMPLED, name)) for name in ("thinking_start", "thinking_end")]
        return isinstance(given, dict) and not self._trials.knows(given) or self.thinking_tags.are_new(budget, tags)

    def try_rules(self, params: Params | None) -> None:
        """Raise `RequestError` unless the structured outputs of params compile, and their tags are known; it may block.

        `check` does the same: call this first if others must not wait for resources held during `check`.
        """
        if not isinstance(params, PoolingParams):
            self._check_grammar(as_sampling_params(params))
            self.thinking_tags.check(as_sampling_params(params))

    def token_ids_of(self, prompt: Any) -> list[int]:
        """Token ids of one prompt of any kind, of any length. Raises `RequestError`."""
        return self._encoder.encode(as_fields(prompt), truncates=True).token_ids

    def has_images(self, prompt: Any) -> bool:
        """Whether `check` would read images first, which takes its time. Raises `RequestError`."""
        return holds_pictures(prompt) and bool(images_in(as_fields(prompt)))

    def read_images(self, prompt: Any) -> dict[str, Any]:
        """Return a prompt whose images have been read, for `check`. Blocks. Raises `RequestError`."""
        return self.pictures.read_prompt(as_fields(prompt))

    def read_image(self, image: Any, field: str = "image") -> ReadPicture:
        """Read and process an image of any form. Blocks. Raises `RequestError` naming the field."""
        return self.pictures.read_all([(field, image)])[0]

    def next_seed(self) -> int:
        """Draw a seed from the engine's own, as a request without one would."""
        self._num_admitted += 1
        return mix(self._seed, self._num_admitted - 1)

    def admit(self, checked: CheckedPrompt, *, priority: int = 0, seed: int | None = None) -> EngineCoreRequest:
        """Make the request to the core. `seed` overrides that of its params; without any it gets `next_seed`."""
        priority = plain(priority)
        if type(priority) is not int or not -(2**63) <= priority < 2**63:
            raise RequestError.for_field("priority", priority, "an int in [-2**63, 2**63)")
        params = checked.params
        drawn = self.next_seed()
        if seed is None:
            seed = drawn if params.seed is None else unsigned(params.seed)
        first_sequence_id = self._next_sequence_id
        self._next_sequence_id += params.n
        return EngineCoreRequest(
            prompt_token_ids=checked.token_ids,
            params=params,
            max_tokens=checked.max_tokens,
            seed=seed,
            first_sequence_id=first_sequence_id,
            eos_token_ids=[] if params.ignore_eos else self.eos_token_ids,
            priority=priority,
            cache_salt=checked.cache_salt,
            bad_words=checked.bad_words,
            pooling=checked.pooling,
            lora=checked.lora,
            pictures=list(checked.pictures),
            thinking=checked.thinking,
        )

    def _check(self, prompt: Any, params: Params | None) -> CheckedPrompt:
        if isinstance(params, PoolingParams):
            return self._check_pooling(prompt, params.clone())
        check_generation(self._generates)
        params, bad_words = self._prepare(as_sampling_params(params))
        fields = as_fields(prompt)
        encoded = self._encoder.encode(fields, truncates=params.truncate_prompt_tokens is not None)
        text, token_ids, pictures = self._encoder.truncate(encoded, params)
        if not token_ids:
            raise RequestError.for_field("prompt", prompt, "at least one token long", "It is empty.")
        max_tokens = resolve_max_tokens(params, len(token_ids), self._max_model_len, clamps=self._clamps)
        check_hidden_asked(params, self._pooling, len(token_ids), max_tokens)
        params.check_num_logprobs(len(token_ids), max_tokens, self._vocab_size)
        check_num_support_ids(params, max_tokens, self._vocab_size)
        return CheckedPrompt(
            text=text,
            token_ids=token_ids,
            params=params,
            max_tokens=max_tokens,
            cache_salt=fields.get("cache_salt") or "",
            bad_words=bad_words,
            lora=_adapter_name(fields),
            pictures=pictures,
            thinking=self.thinking_tags.budget_of(params, token_ids),
        )

    def _check_pooling(self, prompt: Any, params: PoolingParams) -> CheckedPrompt:
        self._check_ids("step_token_ids", params.step_token_ids or ())
        fields = closed_conversation(as_fields(prompt))
        refuse_pictures(fields, "absent: prompts with pictures generate, and are not pooled")
        text, token_ids, _ = self._encoder.encode(fields, truncates=params.truncate_prompt_tokens is not None)
        return CheckedPrompt(
            text=text,
            token_ids=pooled_tokens(token_ids, params, self._pooling, self._max_model_len),
            params=NOTHING_SAMPLED,
            max_tokens=0,
            cache_salt=fields.get("cache_salt") or "",
            bad_words=[],
            pooling=params,
            lora=_adapter_name(fields),
        )

    def _check_at(self, index: int, prompt: Any, params: Any) -> CheckedPrompt:
        try:
            return self._check(prompt, params)
        except RequestError as error:
            raise at_index("prompts", index, error) from error

    def _prepare(self, params: SamplingParams) -> tuple[SamplingParams, list[list[int]]]:
        """Check params and spell their bad words as token ids; once for all prompts of a batch that share them.

        The params are cloned, which checks them again: `msgspec.structs.replace` checks nothing.
        """
        prepared = self._prepared  # another thread may replace it meanwhile
        if prepared is None or prepared[0] is not params:
            clone = params.clone()
            self._check_params(clone)
            self._prepared = prepared = params, clone, self._spell(clone.bad_words or [])
        return prepared[1:]

    def _check_params(self, params: SamplingParams) -> None:
        for field in ("stop", "stop_regex", "bad_words"):
            if getattr(params, field) and self.codec is None:
                bound = "absent with skip_tokenizer_init=True"
                raise RequestError.for_field(field, getattr(params, field), bound, "It needs text.")
        if (params.logprobs or 0) > self._vocab_size:
            bound = f"at most {self._vocab_size}, the vocabulary"
            raise RequestError.for_field("logprobs", params.logprobs, bound)
        if params.asks_for_ids and not self._gives_id_logprobs:
            field = "logprobs" if params.logprobs == -1 else "logprob_token_ids"
            hint = f"Its sampler returns log-probs of the most likely tokens only: logprobs=k, k up to {MAX_LOGPROBS}."
            raise RequestError.for_field(field, getattr(params, field), "absent with device='cuda'", hint)
        check_support_asked(params.return_support, self._gives_id_logprobs)
        self._check_grammar(params)
        self.thinking_tags.check(params)
        check_routing_asked(params.return_routed_experts, self._routing)
        if params.extra_args and not self._takes_extra_args:
            hint = "This engine has no logits_processors to read them."
            raise RequestError.for_field("extra_args", params.extra_args, "absent", hint)
        for field in TOKEN_ID_PARAMETERS:
            self._check_ids(field, getattr(params, field) or ())

    def _check_ids(self, field: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if token_id >= self._vocab_size:
                raise RequestError.for_field(field, token_id, f"ids in [0, {self._vocab_size}), the vocabulary")

    def _check_grammar(self, params: SamplingParams) -> None:
        given = params.structured_outputs
        if given is None:
            return
        if self.codec is None:
            raise RequestError.for_field("structured_outputs", given, "absent with skip_tokenizer_init=True")
        if not self.eos_token_ids and not params.stop_token_ids:
            hint = "The model has no end id, and an output could not end."
            raise RequestError.for_field("structured_outputs", given, "absent without stop_token_ids", hint)
        self._trials.require(given)

    def _spell(self, words: list[str]) -> list[list[int]]:
        """Return every spelling of `words` as token ids."""
        spelt = [(word, ids) for word in words if self.codec for ids in self.codec.encode_word(word)]
        for word, ids in spelt:
            if not ids:
                raise RequestError.for_field("bad_words", word, "words that the tokenizer has tokens for")
            as_token_ids(ids, "bad_words as token ids", self._vocab_size)
        return [ids for _, ids in spelt]

    def _log_clamped(self, batch: list[CheckedPrompt]) -> None:
        """Warn of the prompts of a call whose `max_tokens` was shortened."""
        clamped = [(i, each) for i, each in enumerate(batch) if each.max_tokens < (each.params.max_tokens or 0)]
        if clamped:
            index, first = clamped[0]
            logger.warning(
                "max_tokens of %d of %d prompts was shortened to the room left in max_model_len=%d "
                "(first of prompts[%d], from %d to %d).",
                len(clamped),
                len(batch),
                self._max_model_len,
                index,
                first.params.max_tokens,
                first.max_tokens,
            )


def _pools(params: Any) -> bool:
    """Whether params, one or a list with one each, are those of requests that pool."""
    return any(isinstance(each, PoolingParams) for each in (params if isinstance(params, list | tuple) else [params]))


def _adapter_name(fields: Mapping[str, Any]) -> str:
    """The name of the adapter that a prompt runs under; "" for the base model."""
    lora = fields.get("lora_request")
    return "" if lora is None else as_lora_request(lora).name


def one_each(field: str, given: Any, count: int, single: str) -> list[Any]:
    """Return one value per prompt: one for all (`single` describes it) or a list. Raises `RequestError`."""
    given = plain(given)
    if not isinstance(given, list | tuple):
        return [given] * count
    if len(given) != count:
        raise RequestError.for_field(field, f"a list of {len(given)}", f"{single}, or {count}: one per prompt")
    return list(given)


def at_index(name: str, index: int, error: RequestError) -> RequestError:
    """Return the same error with the index of the batch's element that it is about."""
    return RequestError(f"{name}[{index}]: {error}", field=error.field, value=error.value, bound=error.bound)
