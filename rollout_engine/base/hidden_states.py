"""Hidden states that requests ask for: how they are carried, and the most that one may return; no torch.

carried     int16 [n, H], the bits of bfloat16, or float32 [n, H]: the model's own dtype
returned    float32 [n, H], the same values
"""

import numpy as np

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pooling_params import PoolingInfo
from rollout_engine.base.sampling_params import SamplingParams

MAX_HIDDEN_BYTES = 1 << 27
"""Most bytes of the hidden states that one request returns, as float32."""
_VALUE_BYTES = 4


def as_float32(carried: np.ndarray) -> np.ndarray:
    """The values of carried states, of any shape, as float32: exactly those of the model's dtype."""
    if carried.dtype == np.float32:
        return carried
    return (carried.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def num_state_bytes(info: PoolingInfo | None) -> int:
    """Bytes of one returned state; 0 if the engine returns none."""
    return 0 if info is None else info.hidden_size * _VALUE_BYTES


def check_hidden_asked(
    params: SamplingParams, info: PoolingInfo | None, num_prompt_tokens: int, max_tokens: int
) -> None:
    """Raise `RequestError` for `return_hidden_states` if the engine has none to return, or they are too many."""
    asked = params.return_hidden_states
    if asked is None:
        return
    if info is None:
        hint = "This engine's device returns no hidden states: give device='cpu'."
        raise RequestError.for_field("return_hidden_states", asked, "None", hint)
    row = num_state_bytes(info)
    num_prompt = num_prompt_tokens if asked == "all" else 0
    num_rows = num_prompt + params.n * max_tokens
    if num_rows * row <= MAX_HIDDEN_BYTES:
        return
    room = (MAX_HIDDEN_BYTES // row - num_prompt) // params.n
    what = f"{num_prompt} prompt tokens + " * bool(num_prompt) + f"n={params.n} x {max_tokens} tokens"
    hint = f"({what}) x {info.hidden_size} values = {num_rows * row} bytes. "
    hint += f"Give max_tokens={room} or less." if room > 0 else "Give a smaller n, or a shorter prompt."
    bound = f"of at most {MAX_HIDDEN_BYTES} bytes a request"
    raise RequestError.for_field("return_hidden_states", asked, bound, hint)
