"""Samples with values derived from their lines: group, advantage, texts of tokens."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

Text = str | None
TokenText = Callable[[int], Text]


class Viewed(NamedTuple):
    """A sample of a file, and values derived from it."""

    sample: Mapping[str, Any]
    group: int
    """Number of its group in the files: group ids of later rollouts repeat earlier ones."""
    prompt: str
    response: str
    pieces: list[str]
    """Text of each token of the response; <id> if it is not known."""

    @property
    def reward(self) -> float | None:
        return self.sample.get("reward")

    @property
    def has_failed(self) -> bool:
        """Whether it is an episode that failed."""
        return self.sample.get("error") is not None

    @property
    def name(self) -> str:
        return f"group {self.sample['group_id']}, sample {self.sample['sample_index']}"

    @property
    def mean_log_prob(self) -> float:
        """Mean over the tokens that were sampled; 0 without any."""
        versions = self.sample["policy_version"]
        drawn = [value for value, version in zip(self.sample["log_probs"], versions, strict=True) if version >= 0]
        return math.fsum(drawn) / len(drawn) if drawn else 0.0


def viewed(samples: Iterable[Mapping[str, Any]], token_text: TokenText) -> list[Viewed]:
    """Derive the values that views show. Samples of a group are in the order of their indexes, maybe between others."""
    made: list[Viewed] = []
    newest: dict[Any, Viewed] = {}
    """The last sample with each group id, in an evaluation of each cell."""
    numbers = count()
    texts: dict[int, str] = {}
    for sample in samples:
        for token_id in (*sample["prompt_token_ids"], *sample["response_token_ids"]):
            if token_id not in texts:
                text = token_text(token_id)
                texts[token_id] = f"<{token_id}>" if text is None else text
        prompt, response = sample.get("prompt"), sample.get("response")
        pieces = [texts[token_id] for token_id in sample["response_token_ids"]]
        evaluation = sample.get("evaluation") or {}
        key = (sample["group_id"], *(evaluation.get(name) for name in ("checkpoint", "task", "setting")))
        last = newest.get(key)
        newest[key] = Viewed(
            sample,
            last.group if last and _is_mate(last.sample, sample) else next(numbers),
            "".join(texts[token_id] for token_id in sample["prompt_token_ids"]) if prompt is None else prompt,
            "".join(pieces) if response is None else response,
            pieces,
        )
        made.append(newest[key])
    return made


def _is_mate(last: Mapping[str, Any], sample: Mapping[str, Any]) -> bool:
    """Whether a sample is of the group of an earlier one with the same group id, and not of a later rollout."""
    if "episode_id" not in sample:
        same_prompt = last["prompt_token_ids"] == sample["prompt_token_ids"]
        return bool(same_prompt and last["sample_index"] < sample["sample_index"])
    # With on_rewrite="branch" an episode has a row for each turn, whose prompts differ.
    places = [(each["sample_index"], max(each.get("turns") or [-1])) for each in (last, sample)]
    return places[0] < places[1]


def advantages(samples: Sequence[Viewed]) -> list[float | None]:
    """Reward minus the mean of its group's episodes; None without a reward, and for an episode that failed."""
    rewards: dict[int, dict[int, float]] = {}
    for each in samples:
        if each.reward is not None and not each.has_failed:
            rewards.setdefault(each.group, {})[each.sample["sample_index"]] = each.reward
    means = {group: sum(found.values()) / len(found) for group, found in rewards.items()}  # fsum has no inf - inf
    return [None if each.reward is None or each.has_failed else each.reward - means[each.group] for each in samples]


def visible(text: str) -> str:
    """The text with its control characters as pictures, so that no terminal or page obeys them."""
    return text if text.isprintable() else "".join(map(_picture, text))


def _picture(char: str) -> str:
    if char in "\n\t" or char.isprintable():
        return char
    return chr(0x2400 + ord(char)) if ord(char) < 32 else "\N{REPLACEMENT CHARACTER}"
