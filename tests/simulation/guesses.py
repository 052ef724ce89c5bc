"""Drafts of a simulated engine: what the formula will say next, most of the time."""

from rollout_engine.base.seeds import mix
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.draft_choice import Proposal
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.core.request import Sequence
from rollout_engine.core.speculation import Speculator
from tests.simulation.spelling_worker import VOCAB_SIZE, spelled_token

_MOST = 5


class Guesses(Speculator):
    """Drafts what a sequence says if no weights change on the way; every few tokens something else."""

    def __init__(self, core: EngineCore, config: CoreConfig) -> None:
        assert config.speculation is not None, "the core speculates"
        tables = core._scheduler.tables
        super().__init__(config, config.speculation, tables)
        self._version = lambda: tables.policy_version
        core._scheduler.speculator = self

    def _draft(self, sequence: Sequence) -> list[int]:
        found: list[int] = []
        digest = 0
        for token in sequence.token_ids:
            digest = mix(digest, token)
        version = self._version()
        oldest = version if sequence.kv_min_version is None else sequence.kv_min_version
        for place in range(min(_MOST, sequence.max_num_tokens - len(sequence.token_ids) - 1)):
            token = spelled_token(digest, sequence.seed, version, version, oldest)
            found.append(token if mix(digest, place) % 4 else (token + 1) % VOCAB_SIZE)
            digest = mix(digest, found[-1])
        return found

    def _choose(self, proposals: list[Proposal], num_rows: int, num_samples: int) -> list[int]:
        left, counts = self._max_num_tokens - num_rows, []
        for each in proposals:
            counts.append(min(len(each.token_ids), left))
            left -= counts[-1]
        return counts
