"""A model class for lm-evaluation-harness: its tasks, sampled and scored by an engine of this process.

    from envs_adapters.evaluation.lm_eval import RolloutLM
    lm_eval.simple_evaluate(model=RolloutLM(policy), tasks=["arc_easy", "gsm8k"])

Each call of the harness is one batch for the engine. Log-likelihoods are those of prompt tokens (`prompt_logprobs`), so
equal to the trainer's to the bit where the engine is exact, and a continuation is greedy where each of its tokens has
rank 1. Nothing is left of a context that is too long but its end, as with the harness' own models.
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from rollout_engine.errors import RequestError, unknown_name
from rollout_engine.faces.llm import LLM
from rollout_engine.policy import RolloutPolicy
from rollout_engine.sampling_params import SamplingParams

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
"""Settings of a generation that have the same name here."""
_OWN = ("until", "max_gen_toks", "do_sample")


class RolloutLM(TemplateLM):  # type: ignore[misc]
    """A policy as the harness' model."""

    def __init__(self, policy: RolloutPolicy, *, max_gen_toks: int = 256) -> None:
        """`max_gen_toks`: most tokens of an answer, where a task does not say."""
        super().__init__()
        engine: Any = policy.engine
        self._llm = LLM.from_engine(engine)
        self.tokenizer = policy.tokenizer
        self.max_length: int = policy.frontend.client.info.max_model_len
        self.max_gen_toks = max_gen_toks

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
        """Token ids of a text, without special tokens unless they are asked for."""
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens))
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
        """Log-likelihoods of whole texts, in windows of the model's length."""
        windows: list[tuple[int, tuple[list[int], list[int]]]] = []
        for index, request in enumerate(requests):
            [text] = request.args
            rolled = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length - 1, 1)
            windows += [(index, make_disjoint_window(window)) for window in rolled]
        scored = self._loglikelihood_tokens([(("", ""), *window) for _, window in windows], disable_tqdm=disable_tqdm)
        sums = [0.0] * len(requests)
        for (index, _), (value, _) in zip(windows, scored, strict=True):
            sums[index] += value
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers, each up to the first of its stop strings; greedy unless a task samples."""
        if not requests:
            return []
        contexts: list[Any] = []
        params = []
        for context, settings in (request.args for request in requests):
            params.append(self._params(settings))
            room = self.max_length - (params[-1].max_tokens or 1)
            contexts.append({"prompt_token_ids": self.tok_encode(context)[-room:] or [self.prefix_token_id]})
        outputs = self._llm.generate(contexts, params, use_tqdm=not disable_tqdm)
        return [output.outputs[0].text for output in outputs]

    def _params(self, settings: dict[str, Any]) -> SamplingParams:
        for name in settings:
            if name not in (*_SAMPLING, *_OWN):
                raise RequestError(unknown_name("generation_kwargs of lm-eval", name, (*_SAMPLING, *_OWN)))
        given = {name: settings[name] for name in _SAMPLING if settings.get(name) is not None}
        if not settings.get("do_sample", given.get("temperature", 0.0) > 0):
            given["temperature"] = 0.0
        until = settings.get("until") or []
        stop = [until] if isinstance(until, str) else list(until)
        most = min(settings.get("max_gen_toks", self.max_gen_toks), self.max_length - 1)
        return SamplingParams(**given, max_tokens=most, stop=stop or None)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **unused: Any
    ) -> list[tuple[float, bool]]:
        if not requests:
            return []
        sequences: list[list[int]] = [
            [*context, *continuation][-(self.max_length - 1) :] for _, context, continuation in requests
        ]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, logprobs_mode="raw", detokenize=False)
        prompts: list[Any] = [{"prompt_token_ids": ids} for ids in sequences]
        outputs = self._llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        results = []
        for (_, _, continuation), output in zip(requests, outputs, strict=True):
            assert output.prompt_logprobs is not None and output.prompt_ranks is not None
            first = len(output.prompt_token_ids) - min(len(continuation), len(output.prompt_token_ids) - 1)
            values, ranks = output.prompt_logprobs[first:].tolist(), output.prompt_ranks[first:].tolist()
            results.append((float(sum(values)), all(rank == 1 for rank in ranks)))
        return results
