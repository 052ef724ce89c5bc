"""Log-probs of tokens that another engine or program produced."""

import math

import numpy as np

from worker_ext.base import WorkerExtension, rpc


class ScoreExtension(WorkerExtension):
    """Scores tokens under the live weights, with the same function as the trainer."""

    @rpc
    def score_tokens(
        self, prompt_token_ids: list[list[int]], completion_token_ids: list[list[int]], temperature: float = 1.0
    ) -> list[np.ndarray]:
        """Log-probs of completions as sampling at `temperature` would give them: each float32 [len(completion)]."""
        if not (temperature >= 0 and math.isfinite(temperature)):
            raise ValueError(
                f"temperature={temperature} is not allowed: must be finite and 0 (which counts as 1) or more."
            )
        pairs = list(zip(prompt_token_ids, completion_token_ids, strict=True))
        for index, (prompt, completion) in enumerate(pairs):
            self._check(index, prompt, completion)
        sequences = [prompt + completion for prompt, completion in pairs]
        return self.worker.score(sequences, [len(prompt) for prompt, _ in pairs], temperature or 1.0)

    def _check(self, index: int, prompt: list[int], completion: list[int]) -> None:
        length, limit = len(prompt) + len(completion), self.worker.max_model_len
        if not prompt or length > limit:
            what = f"{len(prompt)} prompt tokens and {length} in all"
            raise ValueError(f"Sequence {index} has {what}: there must be 1 prompt token or more, and {limit} at most.")
        if not all(0 <= token_id < self.worker.vocab_size for token_id in prompt + completion):
            raise ValueError(f"Sequence {index} has token ids outside [0, {self.worker.vocab_size}).")
