import pytest
import torch
from scipy import stats

from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.rng import philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter, key, words):
    found = philox4x32(torch.tensor(counter)[:, None], torch.tensor(key)[:, None])[:, 0]
    assert " ".join(f"{word:08x}" for word in found.tolist()) == words


def test_uniforms_use_the_top_53_bits_of_the_first_two_words():
    seed, position = 0x0123456789ABCDEF, 41
    counter = torch.tensor([position, 0, 0, 0])[:, None]
    first, second = philox4x32(counter, torch.tensor([0x89ABCDEF, 0x01234567])[:, None])[:2, 0].tolist()
    expected = ((first << 32 | second) >> 11) / 2**53
    assert uniforms(torch.tensor([seed]), torch.tensor([position])).item() == expected


def test_every_bit_of_seed_and_position_matters():
    ones = torch.ones(64, dtype=torch.int64)
    bits = ones << torch.arange(64)
    values = torch.cat([uniforms(bits, ones), uniforms(ones * 5, bits)])
    assert len(values.unique()) == 128


def test_a_row_does_not_depend_on_the_others():
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (300,)), torch.randint(0, 9999, (300,))
    together = uniforms(seeds, positions)
    alone = torch.cat([uniforms(seeds[i : i + 1], positions[i : i + 1]) for i in range(300)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_neighbours_are_uniform_and_independent(vary):
    n = 100_000
    fixed, running = torch.full((n,), 7), torch.arange(n)
    u = uniforms(running, fixed) if vary == "seed" else uniforms(fixed, running)
    assert u.dtype == torch.float64
    assert 0 <= u.min() < u.max() < 1
    cells = (u[:-1] * 16).long() * 16 + (u[1:] * 16).long()
    assert stats.chisquare(cells.bincount(minlength=256).numpy()).pvalue > 1e-6


@pytest.mark.skipif(build.load_kernels() is None, reason="no compiler")
def test_the_kernel_and_its_twin_draw_the_same_bits(monkeypatch):
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (500,)), torch.randint(0, 2**40, (500,))
    expected = uniforms(seeds, positions)
    monkeypatch.setattr(build, "load_kernels", lambda: None)
    assert torch.equal(uniforms(seeds, positions), expected)
