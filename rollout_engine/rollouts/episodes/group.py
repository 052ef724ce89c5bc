"""The episodes of one start, of any kind: those of environments and those of agents."""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from rollout_engine.base.outputs import CompletionOutput
from rollout_engine.base.sampling_params import SamplingParams


class EndedEpisode(Protocol):
    """An episode that has ended, as its group reads it."""

    @property
    def num_tokens(self) -> int:
        """Tokens sampled."""
        ...

    @property
    def samples(self) -> Sequence[CompletionOutput]:
        """All answers of policies, each once."""
        ...

    @property
    def counted_reward(self) -> float | None:
        """Its reward in the mean of a rollout; None: it failed, or has none."""
        ...


AnEpisode = TypeVar("AnEpisode", bound=EndedEpisode)


class GroupOfEpisodes(msgspec.Struct, Generic[AnEpisode], frozen=True):
    """The episodes of one start, all of which have ended."""

    index: int
    episodes: list[AnEpisode]
    params: SamplingParams
    lora: str | None = None
    """Name of the adapter that sampled; None: the base alone."""

    @property
    def num_tokens(self) -> int:
        """Tokens sampled."""
        return sum(episode.num_tokens for episode in self.episodes)

    @property
    def samples(self) -> list[CompletionOutput]:
        """All answers of policies."""
        return [sample for episode in self.episodes for sample in episode.samples]

    @property
    def oldest_version(self) -> int | None:
        """Lowest policy version among its tokens; None without any."""
        spans = (span for sample in self.samples for span in sample.version_spans)
        return min((span.policy_version for span in spans), default=None)

    @property
    def total_rewards(self) -> list[float]:
        """Rewards of the episodes that did not fail."""
        return [each for episode in self.episodes if (each := episode.counted_reward) is not None]
