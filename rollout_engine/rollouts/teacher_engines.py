"""Teachers that are engines: of this program, or copies of a policy that follow its weights at a distance."""

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
from torch import Tensor, nn

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError
from rollout_engine.base.lora_request import LoRALike
from rollout_engine.base.token_scores import TokenScores
from rollout_engine.engine.local_client import LocalClient
from rollout_engine.faces.frontend import Frontend
from rollout_engine.faces.llm_engine import LLMEngine
from rollout_engine.faces.verb_methods import BlockingVerbs, Face
from rollout_engine.rollouts.scored_batch import ScoredBatch
from rollout_engine.rollouts.scores import score_pass
from rollout_engine.text.same_tokenizer import tokenizer_difference


class TeacherSource(Protocol):
    """A source of a teacher's log-probs."""

    def check(self, student: Frontend) -> None:
        """Raise `ConfigError` unless its tokens are those of `student`."""
        ...

    @property
    def info(self) -> Any:
        """Sizes of its model; None: not known."""
        ...

    def score(
        self,
        scored: ScoredBatch,
        prompts: Sequence[list[int]] | None,
        candidates: np.ndarray | None,
        top_k: int,
        temperature: float,
    ) -> TokenScores:
        """Scores of all completions, end to end; arguments as of `scores.score_pass`."""
        ...

    def shutdown(self) -> None:
        """End the engine that was started for it. Calling it again is a no-op."""
        ...


class TeacherEngine:
    """An engine that scores. `is_owned`: `shutdown` ends it."""

    def __init__(
        self, face: Face, lora: LoRALike | None = None, *, timeout: float | None = None, is_owned: bool = False
    ) -> None:
        """`lora`: the adapter that scores; None: the base alone, every adapter off."""
        self._engine = _Blocking(face.frontend)
        self._face, self._lora, self._timeout, self._is_owned = face, lora, timeout, is_owned
        self._checked: WeakSet[Frontend] = WeakSet()
        """Students whose tokens are known to be the same."""

    def check(self, student: Frontend) -> None:
        if student not in self._checked:
            check_tokens(self._engine.frontend, student)
            self._checked.add(student)

    @property
    def info(self) -> Any:
        return self._engine.frontend.client.info

    def score(
        self,
        scored: ScoredBatch,
        prompts: Sequence[list[int]] | None,
        candidates: np.ndarray | None,
        top_k: int,
        temperature: float,
    ) -> TokenScores:
        asked: dict[str, Any] = {"candidates": candidates, "top_k": top_k, "temperature": temperature}
        return score_pass(self._engine, scored, prompts=prompts, lora=self._lora, timeout=self._timeout, **asked)

    def shutdown(self) -> None:
        if self._is_owned:
            self._face.shutdown()


class LaggedEngine:
    """An engine with the weights that a policy had up to `every` versions ago."""

    def __init__(self, policy: Face, every: int, engine_kwargs: dict[str, Any]) -> None:
        """Start it, with the policy's live weights. Raises `ConfigError` unless these can be read in this process."""
        client = policy.frontend.client
        if not isinstance(client, LocalClient) or client.info.config.num_ranks > 1:
            raise ConfigError(
                "Teacher.lagged copies the weights of a policy that is in this process and not cut over ranks. For "
                "another one, push the trainer's weights every few steps to a second policy, and give Teacher(that)."
            )
        self._policy, self._every = _Blocking(policy.frontend), every
        config: EngineConfig = client.info.config.clone(**engine_kwargs)
        face = LLMEngine.from_config(config)
        self._engine, self._scorer = face, TeacherEngine(face, is_owned=True)
        self.copied_version = -1
        """Version of the policy whose weights it has."""
        try:
            self._copy()
        except BaseException:
            self.shutdown()
            raise

    def check(self, student: Frontend) -> None:
        self._scorer.check(student)

    @property
    def info(self) -> Any:
        return self._scorer.info

    def score(self, *arguments: Any) -> TokenScores:
        """Take the policy's live weights first, if those it has are `every` versions old."""
        if self._policy.policy_version - self.copied_version >= self._every:
            self._copy()
        return self._scorer.score(*arguments)

    def shutdown(self) -> None:
        self._scorer.shutdown()

    def _copy(self) -> None:
        version = self._policy.policy_version
        [weights] = self._policy.apply_model(_copied_weights)
        self._engine.update_weights(weights)
        self.copied_version = version


def check_tokens(teacher: Frontend, student: Frontend) -> None:
    """Raise `ConfigError` unless both engines have the same tokens; without a tokenizer, as many of them."""
    if teacher is student:
        return
    ours, theirs = student.inputs.codec, teacher.inputs.codec
    if ours is not None and theirs is not None:
        difference = tokenizer_difference(ours, theirs)
    else:
        own, other = student.client.info.vocab_size, teacher.client.info.vocab_size
        difference = "" if own == other else f"a vocabulary of {own} here and {other} there"
    if difference:
        raise ConfigError(
            f"its tokenizer is not the policy's ({difference}), so it would score other tokens. Give a teacher with "
            "the policy's vocabulary and special tokens."
        )


class _Blocking(BlockingVerbs):
    """The verbs of an engine of any face, synchronous. It does not end the engine."""

    def __init__(self, frontend: Frontend) -> None:
        self.frontend = frontend


def _copied_weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all weights, by name."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
