"""The number of tokens that a request may sample behind its prompt."""

from rollout_engine.base.errors import RequestError
from rollout_engine.base.sampling_params import SamplingParams


def resolve_max_tokens(params: SamplingParams, num_prompt_tokens: int, max_model_len: int, *, clamps: bool) -> int:
    """Resolve `max_tokens`: all tokens that fit if it is None, or is shortened to those (`clamps`).

    Raises `RequestError` if they do not fit.
    """
    room = max_model_len - num_prompt_tokens
    asked = params.max_tokens or room
    if room >= 1 and params.min_tokens <= room and (asked <= room or clamps):
        return min(asked, room)
    limit = f"max_model_len={max_model_len}"
    if room < 1:
        bound = f"shorter than {limit} tokens, to leave room for one more"
        raise RequestError.for_field("prompt", f"{num_prompt_tokens} tokens", bound, "See truncate_prompt_tokens.")
    hint = f"The prompt has {num_prompt_tokens} tokens; both together must stay within {limit}."
    if asked > room and not clamps:
        hint += " EngineConfig(on_long='clamp') shortens it instead."
        raise RequestError.for_field("max_tokens", params.max_tokens, f"at most {room}", hint)
    raise RequestError.for_field("min_tokens", params.min_tokens, f"at most {room}", hint)
