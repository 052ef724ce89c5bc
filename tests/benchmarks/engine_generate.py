"""Hugging Face `generate`, as a worker serves it. It returns no log-probs: that would cost it memory and time."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM


class Engine:
    def __init__(self, directory: str, dtype: str) -> None:
        config = AutoConfig.from_pretrained(directory)
        self._model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()

    def run(self, prompts: list[list[int]], num_samples: int, num_sampled: int) -> int:
        """Tokens sampled."""
        inputs = torch.tensor(prompts)
        output = self._model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=True,
            top_k=0,
            num_return_sequences=num_samples,
            min_new_tokens=num_sampled,
            max_new_tokens=num_sampled,
        )
        return output.shape[0] * (output.shape[1] - inputs.shape[1])
