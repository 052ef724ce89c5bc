"""Finished samples to draft tokens from, as they pass between cores, files and clients."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np


class KeptSamples(msgspec.Struct):
    """Finished samples of P prompts to draft tokens from (`core.draft_index`), the prompt seen last at the end.

    Each sample is preceded by the last tokens of its prompt, three at most, behind which drafts are looked up.
    """

    prompt_keys: np.ndarray
    """uint8 [P, 16], blake2b-128 of each prompt and its cache salt (`draft_index.prompt_key`)."""
    num_samples: np.ndarray
    """int64 [P], samples of each prompt, 1 at least; the newest last."""
    lengths: np.ndarray
    """int64 [S], tokens of each sample, 1 at least."""
    token_ids: np.ndarray
    """uint32 [T], the samples end to end."""

    def __post_init__(self) -> None:
        num_prompts, counts = len(self.num_samples), (self.num_samples, self.lengths)
        fits = self.prompt_keys.shape == (num_prompts, 16) and self.prompt_keys.dtype == np.uint8
        fits = fits and all(each.ndim == 1 and each.dtype == np.int64 for each in counts)
        fits = fits and self.token_ids.ndim == 1 and self.token_ids.dtype == np.uint32
        for each, total in zip(counts, (self.lengths, self.token_ids), strict=True):
            fits = fits and not (each < 1).any() and not (each > len(total)).any() and int(each.sum()) == len(total)
        if not fits:
            raise ValueError("kept samples: prompt_keys, num_samples, lengths and token_ids do not fit each other")

    @classmethod
    def of(cls, prompts: Iterable[tuple[bytes, Sequence[Any]]]) -> "KeptSamples":
        """Pack (key, samples) of each prompt; each sample an array of uint32, or convertible to one."""
        prompts = list(prompts)
        samples = [np.asarray(sample, np.uint32) for _, each in prompts for sample in each]
        return cls(
            np.frombuffer(b"".join(key for key, _ in prompts), np.uint8).reshape(-1, 16),
            np.array([len(each) for _, each in prompts], np.int64),
            np.array([len(sample) for sample in samples], np.int64),
            np.concatenate([np.empty(0, np.uint32), *samples]),
        )

    def prompts(self) -> Iterator[tuple[bytes, list[np.ndarray]]]:
        """Yield (key, samples) of each prompt, samples as views of `token_ids`."""
        ends = np.cumsum(self.lengths)
        samples = np.split(self.token_ids, ends[:-1]) if len(ends) else []
        starts = np.cumsum(self.num_samples) - self.num_samples
        for key, start, count in zip(self.prompt_keys, starts.tolist(), self.num_samples.tolist(), strict=True):
            yield key.tobytes(), samples[start : start + count]
