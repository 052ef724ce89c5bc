"""Hugging Face `generate_batch` (continuous batching), as a worker serves it."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

_PAGE = 256


class Engine:
    def __init__(self, directory: str, dtype: str) -> None:
        config = AutoConfig.from_pretrained(directory)
        self._model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()

    def run(self, prompts: list[list[int]], num_samples: int, num_sampled: int) -> int:
        """Tokens sampled."""
        generation = GenerationConfig(
            do_sample=True,
            top_k=0,
            num_return_sequences=num_samples,
            max_new_tokens=num_sampled,
            eos_token_id=-1,
            pad_token_id=0,
        )
        # A size of its own choosing is nine tenths of the memory.
        num_pages = len(prompts) * num_samples * (2 + (len(prompts[0]) + num_sampled) // _PAGE)
        batching = ContinuousBatchingConfig(page_size=_PAGE, num_blocks=num_pages)
        results = self._model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=batching, progress_bar=False
        )
        return sum(len(result.generated_tokens) for result in results.values())
