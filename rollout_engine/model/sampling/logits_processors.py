"""Your own rules for logits: `EngineConfig(logits_processors=[NoDigits])`, or by name, "package.module:Class".

    class NoDigits:
        def __init__(self, vocab_size: int) -> None: ...

        def wants(self, params: SamplingParams) -> bool:
            return bool((params.extra_args or {}).get("no_digits"))

        def apply(self, logits: Tensor, sequence: SequenceView) -> Tensor:
            logits[DIGITS] = -torch.inf
            return logits

A processor gets one row at a time, a float32 copy that it may change, after penalties and bias and before the masks: it
can neither reach another request's logits nor bring back a token that the request forbids. Keep no state per sequence;
derive it from the tokens, so that forked, preempted and replayed requests sample the same tokens. With
`async_scheduling` it may see a sequence one token past its end; that row's result is dropped.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from rollout_engine.base.class_names import find_class
from rollout_engine.base.errors import ConfigError, error_text
from rollout_engine.base.sampling_params import SamplingParams


class SequenceView(NamedTuple):
    """The sequence whose next token is about to be drawn."""

    token_ids: tuple[int, ...]
    """Prompt and sampled tokens."""
    num_prompt_tokens: int
    params: SamplingParams
    """Sampling params; `extra_args` is for your processors."""

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """Sampled tokens."""
        return self.token_ids[self.num_prompt_tokens :]


class LogitsProcessor(Protocol):
    """The interface of classes in `logits_processors`. An exception ends only the sequence that it was raised for."""

    def __init__(self, vocab_size: int) -> None:
        """Called once, in the process that runs the model."""

    def wants(self, params: SamplingParams) -> bool:
        """Whether `apply` edits sequences with `params`; asked once per sequence. Others cost nothing."""
        ...

    def apply(self, logits: Tensor, sequence: SequenceView) -> Tensor:
        """The logits to sample from: floating [V], no NaN, no +inf. `logits` float32 [V] may be changed in place."""
        ...


def load_processors(names: Sequence[str], vocab_size: int) -> list[LogitsProcessor]:
    """Make one instance of each named class. Raises `ConfigError` naming the class that cannot be made."""
    return [_load(name, vocab_size) for name in names]


def _load(name: str, vocab_size: int) -> LogitsProcessor:
    try:
        made: LogitsProcessor = find_class(name)(vocab_size)
    except (Exception, SystemExit) as problem:  # whatever the user's module does when it is loaded
        raise ConfigError(f"logits_processors: '{name}' cannot be made: {error_text(problem)}") from problem
    missing = [method for method in ("wants", "apply") if not callable(getattr(made, method, None))]
    if missing:
        raise ConfigError(f"logits_processors: '{name}' has no method {' or '.join(missing)}; see LogitsProcessor.")
    return made
