"""What structured outputs cost: the same prompts answered freely and under a grammar, taking turns, in one engine.

No answer can end before it has all its tokens, so both kinds compute the same number of steps and of tokens. Ratios are
of the process's own CPU seconds, all threads together, and of time by the clock, in which masks that are filled on
another core hardly show.
"""

import statistics
import time
from pathlib import Path
from typing import Any

from prompts import FreshPrompts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from works import KV_POOL_BYTES

from rollout_engine import LLM, SamplingParams

NUM_REQUESTS, NUM_PROMPT_TOKENS, NUM_TOKENS = 64, 64, 128
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["teacher", "baker", "engineer"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
FORMS = {
    "json": {
        "json": {"type": "array", "items": _PERSON, "minItems": 500, "x-guidance": {"whitespace_flexible": False}}
    },
    "regex": {"regex": r"([0-9]{3}-[0-9]{4}\n){500}"},
}


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A byte-level tokenizer of `vocab_size` tokens, whose merges are those of this folder's sources."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    specials = ["<pad>", "<bos>", "<eos>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(__file__).parent.glob("*.py"))
    inner.train_from_iterator((path.read_text() for path in sources), trainer)
    names = dict(zip(("pad_token", "bos_token", "eos_token"), specials, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(directory)


class Engine:
    """One engine for all forms."""

    def __init__(self, directory: Path, dtype: str, vocab_size: int) -> None:
        write_tokenizer(directory, vocab_size)
        options: dict[str, Any] = dict(dtype=dtype, load_format="dummy", log_stats=False, max_num_seqs=NUM_REQUESTS)
        self._llm = LLM(str(directory), kv_cache_bytes=KV_POOL_BYTES, **options)

    def seconds(self, asked: list[list[int]], form: dict[str, Any] | None, seed: int) -> tuple[float, float]:
        """(wall, CPU) of the answers' tokens; the KV of the prompts is known."""
        self._llm.reset_prefix_cache()
        self._llm.generate(asked, SamplingParams(max_tokens=1), use_tqdm=False)
        params = SamplingParams(
            max_tokens=NUM_TOKENS, seed=seed, logprobs=0, structured_outputs=form, ignore_eos=form is None
        )
        start = time.perf_counter(), time.process_time()
        outputs = self._llm.generate(asked, params, use_tqdm=False)
        spent = time.perf_counter() - start[0], time.process_time() - start[1]
        assert all(len(output.outputs[0].token_ids) == NUM_TOKENS for output in outputs)
        return spent

    def close(self) -> None:
        """End the engine."""
        self._llm.shutdown()


def measure(engine: Engine, form: str, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
    """Tokens per second under the form over those without; the first round warms up.

    Medians of rounds, and the ratio of the best ones, which tells most where other processes use the machine.
    """
    ratios, cpu_ratios = [], []
    free, masked = [], []
    for number in range(rounds + 1):
        asked = prompts.draw(NUM_REQUESTS, NUM_PROMPT_TOKENS)
        spent: dict[bool, tuple[float, float]] = {}
        for is_masked in (True, False) if number % 2 else (False, True):
            spent[is_masked] = engine.seconds(asked, FORMS[form] if is_masked else None, number)
        if number:
            ratios.append(spent[False][0] / spent[True][0])
            cpu_ratios.append(spent[False][1] / spent[True][1])
            free.append(spent[False])
            masked.append(spent[True])
    best = {kind: tuple(map(min, zip(*given, strict=True))) for kind, given in (("free", free), ("masked", masked))}
    return {
        "ratio": round(statistics.median(ratios), 3),
        "cpu_ratio": round(statistics.median(cpu_ratios), 3),
        "best_ratio": round(best["free"][0] / best["masked"][0], 3),
        "best_cpu_ratio": round(best["free"][1] / best["masked"][1], 3),
        "rounds": [round(ratio, 3) for ratio in ratios],
        "cpu_rounds": [round(ratio, 3) for ratio in cpu_ratios],
        "free_cpu_ms_per_step": round(1000 * best["free"][1] / NUM_TOKENS, 2),
    }


def name_of(form: str) -> str:
    """``structured / free, S, 64 x 64+128, json``."""
    return f"structured / free, S, {NUM_REQUESTS} x {NUM_PROMPT_TOKENS}+{NUM_TOKENS}, {form}"
