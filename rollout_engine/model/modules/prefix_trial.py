"""Whether a model computes shared prefixes to the same bits: a trial of a few tokens, once per model."""

from weakref import WeakKeyDictionary

import torch
from torch import nn

from rollout_engine.model.modules.attention_interface import PositionsMissingError
from rollout_engine.model.modules.next_token_logprobs import right_padded_next_tokens, shared_next_tokens
from rollout_engine.model.modules.text_head import vocabulary_of

_ROWS = [[1, 2, 3, 4, 5], [1, 2, 6], [1, 2, 6, 7, 0], [3, 1]]
_found: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def shares_prefixes(model: nn.Module) -> bool:
    """Whether rows that begin alike may be computed together. Raises the model's own errors.

    Not if attention is not given positions, or if anything else mixes the tokens of a row.
    """
    if model not in _found:
        _found[model] = _is_equal(model)
    return _found[model]


def _is_equal(model: nn.Module) -> bool:
    # An engine's packed weights are left on "meta".
    device = next((weight.device for weight in model.parameters() if not weight.is_meta), torch.device("cpu"))
    longest = max(map(len, _ROWS))
    real = torch.tensor([[place < len(row) for place in range(longest)] for row in _ROWS], device=device)
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in _ROWS], device=device)
    ids = (ids % (vocabulary_of(model) or longest)).masked_fill(~real, 0)
    try:
        shared = shared_next_tokens(model, ids, real)
    except PositionsMissingError:
        return False
    assert shared.places is not None, "some tokens are shared"
    return torch.equal(shared.logits[shared.places], right_padded_next_tokens(model, ids, real).logits)
