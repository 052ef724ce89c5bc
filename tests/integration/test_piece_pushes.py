"""Engines in processes of their own take the pieces of 512 KiB that changed, from shared memory, stores and gloo."""

import asyncio

import pytest

from rollout_engine import AsyncLLM
from rollout_engine.testing import tiny_checkpoint, tiny_model
from sync.digests import PIECE_BYTES

OPTIONS = dict(num_kv_blocks=64, num_threads=1, skip_tokenizer_init=True, log_stats=False)
LARGE = {"vocab_size": 9_001}
"""The embedding has several pieces, the last one short."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), **LARGE)


def push_changes(engine, transport):
    """(bytes taken, digest of the weights in the engine, that of a push of everything) after each change."""
    trainer = tiny_model(**LARGE)
    embed = trainer.get_input_embeddings().weight.data.view(-1)
    per_piece = PIECE_BYTES // embed.itemsize
    assert embed.nbytes > 4 * PIECE_BYTES and embed.nbytes % PIECE_BYTES

    async def push(**options):
        report = await engine.update_weights(trainer, transport=transport, **options)
        (digest, *others) = await engine.collective_rpc("get_weight_digest")
        assert all(other == digest for other in others)
        return report, digest

    async def run():
        first, _ = await push(delta=False)
        assert first.num_bytes_sent == first.num_bytes
        for places in ([0], [3 * per_piece], [per_piece, 2 * per_piece - 1], [per_piece - 1, per_piece], []):
            embed[places] += 1
            (report, digest), (whole, wanted) = await push(), await push(delta=False)
            assert (report.digest, digest) == (whole.digest, wanted) and whole.num_bytes_sent == whole.num_bytes
            assert report.num_bytes_sent == len({place // per_piece for place in places}) * PIECE_BYTES
        embed[-1] += 1
        report, _ = await push()
        assert report.num_bytes_sent == embed.nbytes % PIECE_BYTES

    asyncio.run(run())


def test_an_engine_of_its_own_takes_pieces_from_shared_memory_a_store_and_gloo(checkpoint):
    with AsyncLLM(checkpoint, **OPTIONS) as engine:
        for transport in ("shm", "store", "gloo"):
            push_changes(engine, transport)


@pytest.mark.slow
def test_replicas_of_a_fleet_take_pieces(checkpoint):
    with AsyncLLM(checkpoint, num_replicas=2, **OPTIONS) as fleet:
        push_changes(fleet, None)
