"""Samples with what is derived from their lines: group, advantage, texts of tokens."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Text = str | None
TokenText = Callable[[int], Text]


class Viewed(NamedTuple):
    """A sample of a file, and what is derived from it."""

    sample: Mapping[str, Any]
    group: int
    """Number of its group in the files: group ids of later rollouts begin anew."""
    prompt: str
    response: str
    pieces: list[str]
    """Text of each token of the response; <id> where it is not known."""

    @property
    def reward(self) -> float | None:
        return self.sample.get("reward")

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
    """Derive what views show. A group stands together in its file, its samples in the order of their indexes."""
    made: list[Viewed] = []
    texts: dict[int, str] = {}
    for sample in samples:
        for token_id in (*sample["prompt_token_ids"], *sample["response_token_ids"]):
            if token_id not in texts:
                text = token_text(token_id)
                texts[token_id] = f"<{token_id}>" if text is None else text
        prompt, response = sample.get("prompt"), sample.get("response")
        pieces = [texts[token_id] for token_id in sample["response_token_ids"]]
        made.append(
            Viewed(
                sample,
                _group(made[-1], sample) if made else 0,
                "".join(texts[token_id] for token_id in sample["prompt_token_ids"]) if prompt is None else prompt,
                "".join(pieces) if response is None else response,
                pieces,
            )
        )
    return made


def _group(last: Viewed, sample: Mapping[str, Any]) -> int:
    before = last.sample
    same = all(before[key] == sample[key] for key in ("group_id", "prompt_token_ids"))
    return last.group + (not (same and before["sample_index"] < sample["sample_index"]))


def advantages(samples: Sequence[Viewed]) -> list[float | None]:
    """Reward minus the mean of its group; None without a reward."""
    sums: dict[int, list[float]] = {}
    for each in samples:
        if each.reward is not None:
            sums.setdefault(each.group, []).append(each.reward)
    means = {group: sum(rewards) / len(rewards) for group, rewards in sums.items()}  # fsum has no inf - inf
    return [None if each.reward is None else each.reward - means[each.group] for each in samples]


def visible(text: str) -> str:
    """The text with its control characters as pictures, so that no terminal or page obeys them."""
    return "".join(_picture(char) for char in text)


def _picture(char: str) -> str:
    if char in "\n\t" or char.isprintable():
        return char
    return chr(0x2400 + ord(char)) if ord(char) < 32 else "\N{REPLACEMENT CHARACTER}"
