"""Weight updates under load: commits race aborts, pauses and preemption; bad weights come between good ones.

The weights of version v make every greedy token spell v, so each token says which weights made it; the span it lies in
says which version the engine thinks made it.
"""

import asyncio
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import sync
from rollout_engine import (
    AsyncLLM,
    ChecksumError,
    LifecycleError,
    ManifestMismatchError,
    SamplingParams,
    StaleVersionError,
    VersionSpan,
    WeightUpdateError,
)
from rollout_engine.testing import spelled_token, spelling_state_dict, tiny_model
from tests.faults.ledger import Ledger
from tests.faults.progress import report

Weights = dict[str, torch.Tensor]
_MODEL = tiny_model()


def spelling(version: int) -> Weights:
    """Weights that spell `version`."""
    return spelling_state_dict(_MODEL, version)


class Spelled:
    """A check for the ledger, and its count: every token of [start, end) spells the version of its span.

    Tokens over KV of older weights may be neither's; they are only counted.
    """

    def __init__(self) -> None:
        self.num_right = self.num_wrong = self.num_over_old_kv = 0

    def judge(self, tokens: list[int], spans: list[VersionSpan]) -> None:
        """Count the tokens of one ended sample."""
        for span in spans:
            said = tokens[span.start : span.end]
            num_wrong = sum(token != spelled_token(span.policy_version) for token in said)
            if span.kv_min_version != span.policy_version:
                self.num_over_old_kv += len(said)
                continue
            self.num_wrong += num_wrong
            self.num_right += len(said) - num_wrong


class Attack(NamedTuple):
    """Weights that must be refused, and how. Given the good weights of the next version, and the live version."""

    error: type[WeightUpdateError]
    make: Callable[[Weights, int], tuple[Any, int]]
    """(source, version)."""


def _without(weights: Weights, name: str) -> Weights:
    return {key: value for key, value in weights.items() if key != name}


def _breaking_off(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(weights.items())[:3]
    raise ManifestMismatchError("the trainer's own iterator failed")


def _damaged(name: str, _: Weights, version: int) -> tuple[str, int]:
    return name, version + 1


def _flip_a_bit(tensor: Path) -> None:
    content = bytearray(tensor.read_bytes())
    content[9] ^= 4
    tensor.write_bytes(content)


def _move_and_link(tensor: Path) -> None:
    elsewhere = tensor.parents[2] / "elsewhere"
    tensor.rename(elsewhere)
    tensor.symlink_to(elsewhere)


def _rewrite_manifest(old: bytes, new: bytes, tensor: Path) -> None:
    manifest = tensor.parent / "manifest.json"
    content = manifest.read_bytes()
    assert old in content
    manifest.write_bytes(content.replace(old, new))


_NORM = "model.norm.weight"
DAMAGES: dict[str, tuple[type[WeightUpdateError], Callable[[Path], object]]] = {
    "flipped bit": (ChecksumError, _flip_a_bit),
    "truncated tensor": (ManifestMismatchError, lambda tensor: os.truncate(tensor, tensor.stat().st_size - 4)),
    "grown tensor": (ManifestMismatchError, lambda tensor: os.truncate(tensor, tensor.stat().st_size + 4)),
    "missing tensor": (ManifestMismatchError, lambda tensor: tensor.unlink()),
    "extra tensor": (ManifestMismatchError, lambda tensor: (tensor.parent / "extra.memmap").write_bytes(b"1234")),
    "symlinked tensor": (ManifestMismatchError, _move_and_link),
    "pickle inside": (ManifestMismatchError, lambda tensor: (tensor.parent / "a.pickle").write_bytes(b"cos\nsystem\n")),
    "other dtype in the manifest": (ChecksumError, partial(_rewrite_manifest, b'"float32"', b'"int32"')),
    "other shape in the manifest": (ChecksumError, partial(_rewrite_manifest, b"[64]", b"[8,8]")),
    "missing manifest": (ManifestMismatchError, lambda tensor: (tensor.parent / "manifest.json").unlink()),
}
"""What may happen to a store after it was published, given the file of one of its tensors; and how it is refused."""

ATTACKS = {
    "missing": Attack(ManifestMismatchError, lambda w, v: (_without(w, _NORM), v + 1)),
    "extra": Attack(ManifestMismatchError, lambda w, v: (w | {"more": torch.ones(3)}, v + 1)),
    "mis-shaped": Attack(ManifestMismatchError, lambda w, v: (w | {_NORM: torch.ones(63)}, v + 1)),
    "transposed": Attack(
        ManifestMismatchError, lambda w, v: (w | {"lm_head.weight": w["lm_head.weight"].t().contiguous()}, v + 1)
    ),
    "integers": Attack(ManifestMismatchError, lambda w, v: (w | {_NORM: torch.ones(64, dtype=torch.int32)}, v + 1)),
    "NaN": Attack(ChecksumError, lambda w, v: (w | {_NORM: torch.full((64,), float("nan"))}, v + 1)),
    "infinite": Attack(ChecksumError, lambda w, v: (w | {_NORM: torch.full((64,), float("inf"))}, v + 1)),
    "older": Attack(StaleVersionError, lambda w, v: (w, v - 1)),
    "same version, other weights": Attack(StaleVersionError, lambda w, v: (w, v)),
    "breaks off": Attack(ManifestMismatchError, lambda w, v: (_breaking_off(w), v + 1)),
    "bare memory map": Attack(ManifestMismatchError, lambda w, v: ("bare memory map", v + 1)),
} | {name: Attack(error, partial(_damaged, name)) for name, (error, _) in DAMAGES.items()}
"""Those whose source is a name are stores with that damage."""


class UpdatesUnderLoad:
    """Readers, a trainer, an attacker, somebody who pauses and somebody who aborts, all on one engine."""

    def __init__(self, engine: AsyncLLM, directory: Path, seed: int) -> None:
        self.engine, self.directory, self.random = engine, directory, random.Random(seed)
        self.ledger, self.spelled = Ledger(), Spelled()
        self.num_updates = 0
        self.refused: Counter[str] = Counter()
        self.seconds: list[float] = []
        """Of each update."""
        self._attacks = itertools.cycle(self.random.sample(list(ATTACKS), len(ATTACKS)))
        self._stop = False
        self._num_added = 0

    async def run(self, num_updates: int, seconds: float, num_readers: int = 12) -> None:
        """Push `num_updates` versions, or as many as `seconds` allow; then let everything end."""
        await self.engine.update_weights(spelling(self.engine.policy_version + 1))
        others = [self._read() for _ in range(num_readers)] + [self._pause(), self._abort()]
        tasks = [asyncio.create_task(work) for work in others]
        try:
            deadline = time.monotonic() + seconds
            while self.num_updates < num_updates and time.monotonic() < deadline and not any(t.done() for t in tasks):
                await self._update()
                await self._attack()
                report(self.num_updates)
        finally:
            self._stop = True
            await asyncio.gather(*tasks)
        self.ledger.assert_clean()

    async def _update(self) -> None:
        version = self.engine.policy_version + self.random.choice([1, 1, 1, 7])
        weights = spelling(version)
        if self.random.random() < 0.3:
            names = list(weights)
            self.random.shuffle(names)  # the order of arrival means nothing
            weights = {name: weights[name] for name in names}
        start = time.perf_counter()
        kv: Any = self.random.choice(["keep", "recompute"])
        report = await self.engine.update_weights(weights, version=version, kv=kv, timeout=300)
        self.seconds.append(time.perf_counter() - start)
        assert report.version == version and report.num_tensors > 0
        self.num_updates += 1
        if self.random.random() < 0.1:
            again = await self.engine.update_weights(spelling(version), version=version, timeout=300)
            assert again.num_tensors == 0, "the same weights again are not sent"

    async def _attack(self) -> None:
        name = next(self._attacks)
        version = self.engine.policy_version
        error, make = ATTACKS[name]
        source, claimed = make(spelling(version + 3), version)
        if isinstance(source, str):
            source = await asyncio.to_thread(self._damaged_store, source, claimed)
        try:
            await self.engine.update_weights(source, version=claimed, timeout=300)
        except error:
            self.refused[name] += 1
        else:
            raise AssertionError(f"weights were taken that are {name}")
        live = (await self.engine.check_health()).policy_version
        assert live == version, f"{name}: version {live} after a refusal at {version}"

    def _damaged_store(self, kind: str, version: int) -> Path:
        path = self.directory / f"{kind}-{version}-{sum(self.refused.values())}"
        if kind not in DAMAGES:
            path.mkdir()
            (path / "meta.json").write_text("{}")
            return path
        sync.publish(path, spelling(version), version)
        (tensor,) = path.glob(f"versions/*/{_NORM}.memmap")
        _, damage = DAMAGES[kind]
        damage(tensor)
        return path

    async def _read(self) -> None:
        while not self._stop:
            self._num_added += 1
            choose = self.random
            # Even and odd ids: without both, queries and keys would not show.
            prompt = [choose.randrange(3, 250) for _ in range(choose.randint(2, 30))] + [4, 5]
            kind: Any = choose.choice(["cumulative", "delta", "final_only"])
            params = SamplingParams(
                max_tokens=choose.randint(1, 60), temperature=0.0, ignore_eos=True, detokenize=False, output_kind=kind
            )
            leave_after = choose.choice([None] * 8 + [1, 4])
            entry = await self.ledger.run(
                self.engine, prompt, params, f"r{self._num_added}", _nothing, leave_after=leave_after
            )
            for index, tokens in entry.tokens.items():
                self.spelled.judge(tokens, entry.spans[index])

    async def _pause(self) -> None:
        while not self._stop:
            mode: Any = self.random.choice(["abort", "wait", "keep", "keep"])
            await self._insist(partial(self.engine.pause_generation, mode=mode))
            await asyncio.sleep(self.random.choice([0, 0.005]))
            await self._insist(self.engine.resume_generation)
            await asyncio.sleep(self.random.choice([0.005, 0.05, 0.2]))

    async def _insist(self, verb: Callable[[], Awaitable[None]]) -> None:
        """While an update is open neither pause nor resume is allowed."""
        while True:
            try:
                return await verb()
            except LifecycleError as refusal:
                assert "UPDATING" in str(refusal)
                await asyncio.sleep(0.001)

    async def _abort(self) -> None:
        while not self._stop:
            if self.ledger.open:
                await self.engine.abort(self.random.choice(self.ledger.open))
            await asyncio.sleep(self.random.choice([0, 0.01, 0.1]))


def _nothing(*_: object) -> None:
    """Tokens are judged once a request has ended."""
