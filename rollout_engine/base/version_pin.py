"""Which policy versions a request may be sampled under: `policy_version` and `min_policy_version` of its parameters."""

from typing import Any, Literal

from rollout_engine.base.errors import RequestError, RetryableError
from rollout_engine.base.sampling_params import SamplingParams, as_sampling_params

Standing = Literal["in range", "early", "over"]
"""The live version against those that a request asks for: it may begin, has to wait, or never begins."""


def is_pinned(params: SamplingParams) -> bool:
    """Whether `params` ask for a version at all."""
    return params.policy_version is not None or params.min_policy_version is not None


def standing_of(params: SamplingParams, live: int, *, has_tokens: bool = False) -> Standing:
    """Compare the live version with those that `params` ask for.

    `has_tokens`: an engine that is gone has begun the request, in range; out of range it does not continue.
    """
    exact, least = params.policy_version, params.min_policy_version
    if not is_pinned(params) or live == exact or (least is not None and live >= least):
        return "in range"
    is_past = exact is not None and live > exact
    return "over" if is_past or has_tokens or params.version_wait == "end" else "early"


def ends_at_commit(params: SamplingParams, version: int, *, has_begun: bool) -> bool:
    """Whether a request ends, or can never begin, when weights of `version` become live."""
    if not has_begun:
        return standing_of(params, version) == "over"
    least = params.min_policy_version
    return params.policy_version is not None or (least is not None and version < least)


def check_standing(params: SamplingParams, live: int, *, has_tokens: bool = False) -> Standing:
    """Return `standing_of` a new request, and raise if it is refused at once.

    `RequestError` for a version that is past; `RetryableError` for a later one with version_wait="refuse".
    """
    standing = standing_of(params, live, has_tokens=has_tokens)
    if standing == "in range" or has_tokens or params.version_wait == "end":
        return standing
    if standing == "over":
        hint = "An earlier version does not return; sample under the live one, or wait for a later one."
        raise RequestError.for_field("policy_version", params.policy_version, f"at least {live}, the live one", hint)
    if params.version_wait == "refuse":
        what = f"{_word_pin(params)}, and the live version is {live} (version_wait='refuse')"
        raise RetryableError(f"The request asks for {what}: send it again after the next weight update.")
    return standing


def describe_end(params: SamplingParams, live: int) -> str:
    """Word the `error` of a request that ended without all its tokens: the live version is out of its range."""
    what = f"The request asks for {_word_pin(params)}, and version {live} is live"
    if params.policy_version is not None and live > params.policy_version:
        past = "it ended with the tokens it had, all of that version, since none of that version can follow"
        return f"{what}: {past}. To sample it again, ask for the live version or a later one."
    early = "it ended with the tokens it had, none if it had not begun, and did not wait (version_wait='end')"
    return f"{what}, an earlier one: {early}. Send it again after that update, or with version_wait='wait'."


def with_versions(params: Any, policy_version: int | None, min_policy_version: int | None) -> Any:
    """Put the versions that a call asks for into its sampling parameters: one, or a list with one each.

    Raises `RequestError` for values out of bounds, and for parameters that ask for other versions.
    """
    given = {"policy_version": policy_version, "min_policy_version": min_policy_version}
    changes = {name: value for name, value in given.items() if value is not None}
    if not changes:
        return params
    if isinstance(params, list | tuple):
        return [with_versions(each, policy_version, min_policy_version) for each in params]
    checked = as_sampling_params(params)
    for name, value in changes.items():
        if (own := getattr(checked, name)) is not None and own != value:
            raise RequestError.for_field(name, value, f"absent, or {own} as in the sampling parameters")
    return checked.clone(**changes)


def _word_pin(params: SamplingParams) -> str:
    if params.policy_version is not None:
        return f"policy_version={params.policy_version}"
    return f"min_policy_version={params.min_policy_version}"
