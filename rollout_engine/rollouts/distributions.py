"""Whole distributions of next tokens, as an engine's steps compute them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout_engine.base.errors import RequestError
from rollout_engine.base.lora_request import LoRALike
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.faces.frontend import Frontend
from rollout_engine.faces.generate_run import GenerateRun, generate
from rollout_engine.text.prompts import with_lora


class DistributionMethods:
    """Methods of a policy for the distributions that its engine draws from."""

    frontend: Frontend

    def distributions(
        self,
        token_ids: Sequence[int],
        places: Sequence[int],
        *,
        temperature: float = 1.0,
        lora_request: LoRALike | None = None,
    ) -> np.ndarray:
        """Tempered log-probs of the whole vocabulary under the live weights -> float32 [n, V].

        Row i is the distribution of the token behind the first `places[i]`, 1 at least, of `token_ids`. Each is
        computed by a request that draws one token behind these and finds most of their KV in the prefix cache: all
        rows are held at once, so give a few places at a time. The requests draw, so later ones without a seed get other
        seeds. `temperature` 0 counts as 1. Raises `RequestError` for places outside of the sequence, on a device, and
        if the engine cannot compute one; `LifecycleError` while it does not run.
        """
        for place in places:
            if not 1 <= place <= len(token_ids):
                raise RequestError.for_field("places", place, f"from 1 to {len(token_ids)}, the tokens given")
        params = SamplingParams(max_tokens=1, temperature=temperature or 1.0, logprobs=-1, detokenize=False)
        prompts: Any = [{"prompt_token_ids": list(token_ids[:place])} for place in places]
        self.frontend.require_running("distributions")
        self.frontend.ensure_loras(lora_request)
        run = GenerateRun(self.frontend, "distributions")
        outputs = generate(run, with_lora(prompts, lora_request), params, use_tqdm=False)
        rows = []
        for place, output in zip(places, outputs, strict=True):
            (sample,) = output.outputs
            if sample.top_logprobs is None or not sample.token_ids:
                reason = sample.error or sample.finish_reason
                raise RequestError(f"distributions: nothing was computed behind {place} tokens: {reason}.")
            ids, logprobs = sample.top_logprobs
            row = np.empty(ids.shape[1], np.float32)
            row[ids[0]] = logprobs[0]
            rows.append(row)
        return np.stack(rows) if rows else np.empty((0, 0), np.float32)
