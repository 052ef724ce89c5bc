"""A reward model as a reward function: a checkpoint whose head gives one number, on an engine in this process."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rollout_engine.base.errors import ConfigError, RequestError, RewardError
from rollout_engine.base.pooling_params import PoolingParams, check_pooling
from rollout_engine.faces.llm import LLM
from rollout_engine.text.conversations import is_conversation


class RewardModel:
    """A reward function that asks a reward model. Keyword arguments are `EngineConfig`'s.

    >>> with RewardModel("path/to/reward-model") as reward, RolloutPolicy.from_pretrained("path/to/policy") as policy:
    ...     batch = policy.rollout(prompts, num_samples=8, reward_fn=reward)

    The checkpoint has a head with one label for sequences (...ForSequenceClassification with num_labels=1, or
    ...ForRewardModel). It runs on the CPU in the process of its caller, and a rollout's steps wait while it computes.
    The completions of one call are computed together, and their prompt once. Several threads may call it at once.
    """

    def __init__(
        self, model: str | os.PathLike[str], *, truncate_prompt_tokens: int | None = None, **engine_kwargs: Any
    ) -> None:
        """Load the model. Raises `ConfigError` if it cannot be served, or has no head with one label.

        `truncate_prompt_tokens`: keep only that many last tokens of prompt and completion; -1: as many as fit
        `max_model_len`; None: longer ones raise `RequestError`.
        """
        self._params = PoolingParams(kind="reward", truncate_prompt_tokens=truncate_prompt_tokens)
        self.llm = LLM(model, **({"device": "cpu"} | engine_kwargs))
        """The engine: for `update_weights`, `sleep`, `encode` and so on."""
        self.__name__ = Path(model).name
        """The name of its rewards in a batch, when it is one of several reward functions."""
        try:
            self._check_head()
        except RequestError as problem:
            self.llm.shutdown()
            raise ConfigError(f"RewardModel({str(model)!r}): {problem}") from None

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Any,
    ) -> list[float]:
        """One reward for each completion of its prompt; `columns` are not read.

        A text is continued by its completion. A conversation ends with it: its messages, or a text of the assistant's;
        the model's own chat template renders both. Prompts that are token ids need `completion_ids`, of the same
        tokenizer as this model's. Raises `RequestError` for prompts of another form, and `RewardError` if the engine
        fails.
        """
        counts = {len(each) for each in (prompts, completions, completion_ids) if each is not None}
        if len(counts) > 1:
            bound = f"{len(prompts)}, one for each prompt"
            raise RequestError.for_field("completions", f"a list of {len(completions)}", bound)
        ids = [None] * len(prompts) if completion_ids is None else completion_ids
        if not len(prompts):
            return []
        whole = [_join_prompt(i, *each) for i, each in enumerate(zip(prompts, completions, ids, strict=True))]
        found = self.llm.encode(whole, self._params, use_tqdm=False)
        rewards = []
        for index, output in enumerate(found):
            if output.outputs.data is None:
                reason = output.outputs.error or output.outputs.finish_reason
                raise RewardError(f"{self.__name__}: completions[{index}] has no reward: {reason}.")
            rewards.append(float(output.outputs.data[0]))
        return rewards

    def shutdown(self) -> None:
        """End the engine. Calling it again is a no-op."""
        self.llm.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _check_head(self) -> None:
        info = self.llm.frontend.client.info.pooling
        check_pooling(self._params, info, 1)
        if info is not None and info.head != "sequence":
            bound = "a checkpoint with a head for sequences"
            raise RequestError.for_field(
                "model", f"a head for {info.head}s", bound, "LLM.reward gives all its rewards."
            )


def _join_prompt(index: int, prompt: Any, completion: Any, completion_ids: Sequence[int] | None) -> dict[str, Any]:
    """The prompt to pool: one of any form, and its completion."""
    fields = dict(prompt) if isinstance(prompt, Mapping) and "role" not in prompt else {"prompt": prompt}
    not_ours = ("prompt", "messages", "prompt_token_ids", "lora_request")  # the adapter is one of the policy's
    options = {key: value for key, value in fields.items() if key not in not_ours}
    inner: Any = fields.get("prompt", fields.get("messages", fields.get("prompt_token_ids")))
    if isinstance(inner, str) and isinstance(completion, str):
        return {**options, "prompt": inner + completion}
    if is_conversation(inner) and isinstance(completion, str | list | tuple):
        said = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
        for name in ("add_generation_prompt", "continue_final_message"):  # they are of the prompt alone
            options.pop(name, None)
        return {**options, "messages": [*inner, *said]}
    if hasattr(inner, "tolist"):
        inner = inner.tolist()
    if isinstance(inner, list | tuple) and completion_ids is not None:
        return {**options, "prompt_token_ids": [*inner, *completion_ids]}
    bound = "a text with a text as completion, a conversation, or token ids with completion_ids"
    raise RequestError.for_field(f"prompts[{index}]", prompt, bound, f"The completion is {completion!r:.80}.")
