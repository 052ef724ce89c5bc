"""The rule by which routers weight experts, for the formulas in `model/modules/experts.py` and for kernels."""

from typing import NamedTuple


class Groups(NamedTuple):
    """Groups of experts, of equal sizes, from some of which alone a router chooses."""

    num: int
    num_chosen: int
    sums_two: bool
    """Whether a group's score is the sum of its two largest; else it is its largest."""


class RoutingRule(NamedTuple):
    """The way a router turns its scores into weights of experts."""

    normalised: bool
    """Whether the k weights are divided by their sum."""
    rounded: bool
    """Whether they are rounded to the dtype of the router's weight; else they stay float32."""
    sigmoid: bool = False
    """Whether scores are sigmoids of logits; else they are a softmax."""
    precise: bool = False
    """Whether logits are float32 sums, in a model of another dtype; else they are rounded to that dtype."""
    groups: Groups | None = None
    scaling: float = 1.0
    """Multiplies the weights at last."""
    added: float = 0.0
    """Added to the sum that divides them."""
    least: float = 0.0
    """The sum that divides them is at least this."""
    stepwise: bool = False
    """Whether scores, the sum that divides them, shares and products are each rounded to that dtype too (LFM2)."""
