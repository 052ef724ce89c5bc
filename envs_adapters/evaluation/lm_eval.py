"""A model class for lm-evaluation-harness: its tasks, sampled and scored by an engine of this process.

    from envs_adapters.evaluation.lm_eval import RolloutLM
    lm_eval.simple_evaluate(model=RolloutLM(policy), tasks=["arc_easy", "gsm8k"])

Each call of the harness is one batch for the engine. Log-likelihoods are those of prompt tokens (`prompt_logprobs`), so
equal to the trainer's to the bit if the engine is exact, and a continuation is greedy if each of its tokens has
rank 1. Texts get the special tokens that the tokenizer adds, a first token for example, unless they begin with it, and
only the end of a context that is too long is left, as with the harness' own models.
"""

import logging
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from rollout_engine.base.errors import RequestError, unknown_name
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.faces.llm import LLM
from rollout_engine.rollouts.policy import RolloutPolicy

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
"""Settings of a generation that have the same name here."""
_OWN = ("until", "max_gen_toks", "do_sample")

logger = logging.getLogger("rollout_engine")


class RolloutLM(TemplateLM):  # type: ignore[misc]
    """A policy as the harness' model."""

    def __init__(self, policy: RolloutPolicy, *, max_gen_toks: int = 256, add_bos_token: bool | None = None) -> None:
        """`max_gen_toks`: most tokens of an answer, unless a task has its own.

        `add_bos_token`: whether texts get the tokenizer's special tokens; None: those that it adds by default, unless a
        text begins with its first token, as one from a chat template may.
        """
        super().__init__()
        engine: Any = policy.engine
        self._llm = LLM.from_engine(engine)
        self.tokenizer = policy.tokenizer
        self.max_length: int = policy.frontend.client.info.max_model_len
        self.max_gen_toks, self._add_bos_token = max_gen_toks, add_bos_token

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: the tokenizer's first token, else its end token."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for the harness' caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text; `add_special_tokens=None`: with those that `RolloutLM(add_bos_token=...)` asks for."""
        if add_special_tokens is None:
            first = self.tokenizer.bos_token
            has_first = first is not None and string.startswith(first)
            add_special_tokens = self._add_bos_token is not False and not has_first
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, by the tokenizer's template."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows of the model's length; each token counts once."""
        windows: list[tuple[int, tuple[list[int], list[int]]]] = []
        for index, request in enumerate(requests):
            [text] = request.args
            rolled = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length - 1, 1)
            windows += [(index, make_disjoint_window(window)) for window in rolled]
        scored = self._llm.score([context for _, (context, _) in windows], [counted for _, (_, counted) in windows])
        sums = [0.0] * len(requests)
        for (index, _), values in zip(windows, scored, strict=True):
            sums[index] += float(sum(values.tolist()))
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers, each up to the first of its stop strings; greedy unless a task samples."""
        if not requests:
            return []
        prompts: list[Any] = []
        params = []
        num_cut = num_lowered = 0
        for context, settings in (request.args for request in requests):
            ids, budget = self.tok_encode(context) or [self.prefix_token_id], self._budget(settings)
            # The excess is cut from the answer while that keeps half of the context, then from the prompt.
            num_tokens = min(budget, max(self.max_length - len(ids), self.max_length // 2))
            kept = ids[-(self.max_length - num_tokens) :]
            num_cut, num_lowered = num_cut + (len(kept) < len(ids)), num_lowered + (num_tokens < budget)
            prompts.append({"prompt_token_ids": kept})
            params.append(self._params(settings, num_tokens))
        if num_cut or num_lowered:
            numbers = (num_cut, num_lowered, len(prompts), self.max_length)
            what = (
                "lm-eval: %d prompts were cut to their ends and %d max_gen_toks lowered, of %d, to fit into %d tokens"
            )
            logger.warning(what, *numbers)
        outputs = self._llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        return [output.outputs[0].text for output in outputs]

    def _budget(self, settings: dict[str, Any]) -> int:
        budget = settings.get("max_gen_toks", self.max_gen_toks)
        if type(budget) is not int or budget < 1:
            raise RequestError.for_field("generation_kwargs.max_gen_toks", budget, "an int of at least 1")
        return budget

    def _params(self, settings: dict[str, Any], num_tokens: int) -> SamplingParams:
        for name in settings:
            if name not in (*_SAMPLING, *_OWN):
                raise RequestError(unknown_name("generation_kwargs of lm-eval", name, (*_SAMPLING, *_OWN)))
        given = {name: settings[name] for name in _SAMPLING if settings.get(name) is not None}
        if not settings.get("do_sample", given.get("temperature", 0.0) > 0):
            given["temperature"] = 0.0
        until = settings.get("until") or []
        stop = [until] if isinstance(until, str) else list(until)
        return SamplingParams(**given, max_tokens=num_tokens, stop=stop or None)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **unused: Any
    ) -> list[tuple[float, bool]]:
        if not requests:
            return []
        longest = self.max_length - 1  # the engine samples a token behind each
        for (_, text), _, continuation in requests:
            if len(continuation) >= longest:
                bound = f"shorter than {longest} tokens, so that it fits into max_model_len={self.max_length}"
                raise RequestError.for_field(f"continuation {text!r:.40}", len(continuation), bound)
        whole = [[*context, *continuation] for _, context, continuation in requests]
        if num_cut := sum(len(ids) > longest for ids in whole):
            logger.warning(
                "lm-eval: %d of %d contexts were cut to their ends, to fit into %d tokens", num_cut, len(whole), longest
            )
        sequences = [ids[-longest:] for ids in whole]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, logprobs_mode="raw", detokenize=False)
        prompts: list[Any] = [{"prompt_token_ids": ids} for ids in sequences]
        outputs = self._llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        results = []
        for (_, _, continuation), output in zip(requests, outputs, strict=True):
            assert output.prompt_logprobs is not None and output.prompt_ranks is not None
            first = len(output.prompt_token_ids) - len(continuation)
            values, ranks = output.prompt_logprobs[first:].tolist(), output.prompt_ranks[first:].tolist()
            results.append((float(sum(values)), all(rank == 1 for rank in ranks)))
        return results
