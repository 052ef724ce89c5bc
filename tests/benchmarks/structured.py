"""What structured outputs cost: the same prompts answered freely and under a grammar, taking turns, in one engine.

Much of what random weights draw is against the grammar, and each such token takes a mask and a second draw. Little of
what a model draws that has been trained for the form is: "json, trained" is measured with one, which learns it here.

No answer can end before it has all its tokens, so both kinds compute the same number of steps and of tokens. Ratios are
of the process's own CPU seconds, all threads together, and of time by the clock, in which masks that are filled on
another core hardly show.
"""

import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from prompts import FreshPrompts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from works import KV_POOL_BYTES, SHAPES, write_config

from rollout_engine import LLM, SamplingParams

NUM_REQUESTS, NUM_PROMPT_TOKENS, NUM_TOKENS = 64, 64, 128
_NUM_TRAINING_STEPS = 150
_WORDS = "token engine prompt weight batch cache block draft score mask step shape norm group policy replica".split()
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


def train(directory: Path) -> None:
    """Train the model for documents of the JSON form behind random prompts, and write its weights there; a minute."""
    tokenizer, rng = PreTrainedTokenizerFast.from_pretrained(directory), random.Random(0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, _NUM_TRAINING_STEPS)
    for _ in range(_NUM_TRAINING_STEPS):
        prompts = [[rng.randrange(len(tokenizer)) for _ in range(16)] for _ in range(16)]
        rows = torch.tensor([prompt + tokenizer.encode(_document(rng))[:112] for prompt in prompts])
        labels = rows.clone()
        labels[:, :16] = -100
        model(input_ids=rows, labels=labels).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)


def _document(rng: random.Random) -> str:
    people = [
        {
            "name": " ".join(rng.choice(_WORDS).title() for _ in range(2)),
            "age": rng.randrange(100),
            "kind": rng.choice(_PERSON["properties"]["kind"]["enum"]),
            "tags": rng.sample(_WORDS, rng.randrange(5)),
        }
        for _ in range(6)
    ]
    return json.dumps(people, separators=(",", ":"))


class Engine:
    """One engine for all forms, with random weights or trained ones."""

    def __init__(self, directory: Path, is_trained: bool = False) -> None:
        dtype, vocab_size = SHAPES["S"]["dtype"], SHAPES["S"]["vocab_size"]
        write_tokenizer(write_config(directory, "S"), vocab_size)
        if is_trained:
            train(directory)
        load_format = "auto" if is_trained else "dummy"
        options: dict[str, Any] = dict(dtype=dtype, load_format=load_format, log_stats=False, max_num_seqs=NUM_REQUESTS)
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


def name_of(form: str, is_trained: bool) -> str:
    """``structured / free, S, 64 x 64+128, json, trained``."""
    model = ", trained" if is_trained else ""
    return f"structured / free, S, {NUM_REQUESTS} x {NUM_PROMPT_TOKENS}+{NUM_TOKENS}, {form}{model}"
