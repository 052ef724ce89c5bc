"""Tries a type of model: an engine serves a tiny random one, and trainer, transformers and ranks compute the same.

bits        of samples of a small engine and of `exact.load`; and they are close to transformers' own log-probs
gradients   of one step of the exact trainer, beside autograd of transformers' own module
ranks       logits of two ranks, beside those of one process
device      our Triton kernels in the interpreter, by the trial that an engine makes at its start
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollout_engine import LLM, EngineConfig, SamplingParams, exact
from rollout_engine.base.errors import ConfigError
from rollout_engine.execution.made_with import made_with
from rollout_engine.kernels.cpu.gemm import supports
from rollout_engine.kernels.linear import _plan
from rollout_engine.model.cuda import decoder_trial
from rollout_engine.model.loading.loader import load_model
from tests.models.results import COLUMNS, Row, has_all_parts
from tests.models.tiny import kind_of, sizes_of, tiny_for_ranks, tiny_of
from tests.parity.test_bits import mismatches
from tests.parity.test_sweep import assert_right, draw_prompts
from tests.unit.kernels.triton.mended_interpreter import mend_interpreter
from tests.unit.model.ranked import Partner, backend_of, logits_of

SAMPLED = SamplingParams(max_tokens=12, n=2, seed=7, logprobs=0, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
SMALL = dict(max_num_batched_tokens=33, num_kv_blocks=16, block_size=16, max_model_len=128, num_threads=1)
CPU = torch.device("cpu")
LARGEST_ERROR = 1e-3
"""Of a gradient, relative to its norm, or to a thousandth of the largest norm of all."""
NOT_BUILT = "untried: transformers builds no tiny model of it from the generic recipe"


@contextlib.contextmanager
def tried() -> Iterator["Trial"]:
    """A trial. Meanwhile products are our own, which compiled layers need, and Triton's interpreter is mended."""
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(Ranks()) as ranks:
        patch.setattr("rollout_engine.kernels.cpu.gemm.is_fast", supports)
        _plan.cache_clear()
        torch.set_num_threads(1)
        mend_interpreter(patch)
        yield Trial(ranks)
    _plan.cache_clear()


def describe_machine() -> str:
    """Versions of the libraries and the instruction set, which bits depend on."""
    facts = made_with(CPU)
    instructions = facts["device"].removeprefix("cpu, ")
    return f"transformers {facts['transformers']}, torch {facts['torch']}, {facts['machine']} with {instructions}"


class Trial:
    """Fills rows of results.json."""

    def __init__(self, ranks: "Ranks") -> None:
        self._ranks = ranks

    def try_type(self, name: str, folder: Path, row: Row | None = None, parts: Sequence[str] = tuple(COLUMNS)) -> Row:
        """The row of a type or composite, whose tiny models are written to `folder`.

        `row`: the one that it has, of which all columns stay but those of `parts`.
        """
        fixed = {"kind": kind_of(name), "sizes": sizes_of(name), "made_with": describe_machine()}
        path, refusal = _save_served(name, folder)
        if path is None:
            return fixed | {"float32": refusal}
        anew = {column for part in parts for column in COLUMNS[part]}
        row = fixed | {column: found for column, found in (row or {}).items() if column not in anew | fixed.keys()}
        for part in COLUMNS:
            if part in parts and (part == "bits" or has_all_parts(row)):
                row |= self._try_part(part, name, path)
        kept = row.keys() if has_all_parts(row) else {*fixed, *COLUMNS["bits"]}
        return {column: found for column, found in row.items() if column in kept}

    def _try_part(self, part: str, name: str, path: Path) -> Row:
        attempt = {
            "bits": self._try_bits,
            "gradients": self._try_gradients,
            "ranks": self._try_ranks,
            "device": self._try_device,
        }[part]
        try:
            return attempt(name, path)
        except Exception as problem:  # whatever fails, the other types are tried
            return dict.fromkeys(COLUMNS[part], f"wrong: {type(problem).__name__}: {_without(path, problem)}")

    def _try_bits(self, name: str, path: Path) -> Row:
        row, layers = {}, {}
        for dtype in ("float32", "bfloat16"):
            row[dtype], layers[dtype] = _compare_bits(name, path, dtype)
        ways = {found for found in layers.values() if found}
        if ways:
            row["layers"] = ways.pop() if len(ways) == 1 else "one call in one dtype, modules in the other"
        return row

    def _try_gradients(self, name: str, path: Path) -> Row:
        return {"gradients": compare_gradients(path)}

    def _try_ranks(self, name: str, path: Path) -> Row:
        if (tiny := tiny_for_ranks(name)) is not None:
            tiny.save(path := path.parent / "ranks")
        return {"ranks": self._ranks.compare(path)}

    def _try_device(self, name: str, path: Path) -> Row:
        loaded = load_model(_config(path))
        if any(layer.index_topk for layer in loaded.geometry):
            return {"device": "refused: indexers choose positions on a CPU alone"}
        for deterministic, outcome in ((True, "exact"), (False, "round-off")):
            reason = decoder_trial.unsupported_reason(loaded.module, loaded.geometry, deterministic=deterministic)
            if reason is None:
                return {"device": outcome}
        return {"device": f"{'wrong' if reason.is_failure else 'modules'}: {_without(path, reason.text)}"}


class Ranks:
    """Rank 1 of 2 in a process of its own, which starts when it is first needed."""

    def __init__(self) -> None:
        self._partner: Partner | None = None

    def compare(self, path: Path) -> str:
        """Outcome of two ranks: "equal" to one process, or "refused" with the reason."""
        try:  # what cannot be cut is refused before the other rank is asked
            load_model(_config(path), CPU, SimpleNamespace(rank=0, num_ranks=2, splits_sums=False, pipe=None))
        except ConfigError as refusal:
            return f"refused: {_without(path, refusal)}"
        try:
            whole = logits_of(backend_of(path, dtype="float32"))
            self._partner = self._partner or Partner()
            cut = logits_of(backend_of(path, self._partner.begin(path, dtype="float32"), dtype="float32"))
        except ConfigError as refusal:
            self.close()
            return f"refused: {_without(path, refusal)}"
        except Exception:  # the other rank is lost
            self.close()
            raise
        return "equal" if all(map(torch.equal, cut, whole)) else "wrong: logits differ from those of one process"

    def close(self) -> None:
        """End the process."""
        if self._partner is not None:
            self._partner.end()
        self._partner = None


def _config(path: Path, **options: str) -> EngineConfig:
    return EngineConfig(model=str(path), dtype="float32", num_kv_blocks=64, skip_tokenizer_init=True, **options)


def _save_served(name: str, folder: Path) -> tuple[Path | None, str]:
    """The first tiny checkpoint of a type that is not refused; if all are, None and the first refusal."""
    refusals = []
    for number, tiny in enumerate(tiny_of(name)):
        tiny.save_config(path := folder / str(number))
        try:
            load_model(_config(path, load_format="dummy"))
        except ConfigError as refusal:
            refusals.append(f"refused: {_without(path, refusal)}")
        else:
            tiny.save(path)
            return path, ""
    return None, refusals[0] if refusals else NOT_BUILT


def _compare_bits(name: str, path: Path, dtype: str) -> tuple[str, str]:
    """(outcome, how the layers ran) of an engine of this dtype."""
    prompts = draw_prompts(name)
    try:
        with LLM(str(path), dtype=dtype, log_stats=False, **SMALL) as llm:
            sampled = llm.generate(prompts, SAMPLED, use_tqdm=False)
            greedy = llm.generate(prompts, GREEDY, use_tqdm=False)
            choices = llm.frontend.client.info.choices
    except ConfigError as refusal:
        return f"refused: {_without(path, refusal)}", ""
    layers = "one call" if "decoder compiled" in choices else "modules"
    if dtype == "float32" and kind_of(name) == "type":  # a composite's text model was compared at load
        assert_right(path, greedy)
    try:
        trainer = exact.load(path, getattr(torch, dtype))
    except ConfigError as refusal:
        outcome = "wrong" if "deterministic True" in choices else "round-off"
        return f"{outcome}: {_without(path, refusal)}", layers
    compared, wrong = mismatches(sampled + greedy, trainer, 1.0)
    return (f"wrong: {wrong} of {compared} log-probs differ from the trainer's" if wrong else "exact"), layers


def compare_gradients(path: Path) -> str:
    """Outcome for the gradients of a checkpoint: "equal", or "differ" with the worst parameter."""
    ids = torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(40) < torch.tensor([40, 23])[:, None]
    weights = torch.randn(2, 39, generator=torch.Generator().manual_seed(1))
    trainer = exact.load(path, torch.float32)
    (exact.token_logprobs(trainer, ids, mask) * weights).sum().backward()
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    logits = plain.requires_grad_(True)(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits[:, :-1]
    logprobs = logits.float().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    (logprobs * weights * mask[:, 1:]).sum().backward()
    theirs = {name: _gradient_of(parameter) for name, parameter in plain.named_parameters()}
    ours = {name: _gradient_of(parameter) for name, parameter in trainer.named_parameters()}
    if ours.keys() != theirs.keys():
        return f"differ: only one of the two has {', '.join(sorted(ours.keys() ^ theirs.keys())[:3])}"
    least = 1e-3 * max(float(gradient.norm()) for gradient in theirs.values())
    errors = {name: float((ours[name] - theirs[name]).norm()) / max(float(theirs[name].norm()), least) for name in ours}
    worst = max(errors, key=errors.__getitem__)
    return "equal" if errors[worst] < LARGEST_ERROR else f"differ: {worst} by {errors[worst]:.0e} of its norm"


def _gradient_of(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _without(path: Path, problem: object) -> str:
    """A message in one line, without the folder of the checkpoint."""
    folder = re.escape(str(path.parent))
    return " ".join(re.sub(rf"{folder}(/\w+)?", "the checkpoint", str(problem)).split())
