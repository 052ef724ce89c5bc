"""A whole engine over the fake executor: only the model is not real."""

import numpy as np

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.pooling_params import PoolingInfo
from rollout_engine.base.token_scores import TokenScores
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.core.fake_executor import FakeExecutor
from rollout_engine.engine.client import EngineInfo
from rollout_engine.engine.local_client import LocalClient
from rollout_engine.faces.frontend import Frontend
from rollout_engine.faces.llm_engine import LLMEngine
from rollout_engine.testing import byte_tokenizer
from rollout_engine.text.tokenizer import TextCodec

VOCAB_SIZE = 259
EOS = 2
BLOCK_SIZE = 4
CODEC = TextCodec(byte_tokenizer())


class FakeModel(FakeExecutor):
    """The fake executor with what a driver asks of one besides steps; `interrupt_at_step` is the user's Ctrl-C."""

    interrupt_at_step = -1
    is_shut_down = dirty = False
    num_weight_bytes = 0
    threads = ()
    before_step = staticmethod(lambda: None)
    scored_at = None
    updater = kv_link = None

    def __init__(self, max_model_len=128, **options):
        super().__init__(block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE, **options)
        self.info = EngineInfo(
            max_prefill_beside_decode=0,
            config=EngineConfig(model="fake", skip_tokenizer_init=True),
            num_blocks=256,
            block_size=BLOCK_SIZE,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS],
            dtype="float32",
            choices="a fake",
            pooling=PoolingInfo(hidden_size=2),
        )

    def execute(self, work):
        self.before_step()
        if work.step == self.interrupt_at_step:
            self.interrupt_at_step = -1
            raise KeyboardInterrupt
        return super().execute(work)

    def updater_for(self, *, draft):
        assert not draft
        return self.updater

    def score(self, sequences, num_prompt, temperature):
        """Minus position over temperature; a sequence is a piece."""
        self.scored_at = temperature
        pairs = zip(sequences, num_prompt, strict=True)
        for i, (ids, first) in enumerate(pairs):
            yield {i: TokenScores(-np.arange(first, len(ids), dtype=np.float32) / np.float32(temperature))}

    def metadata(self):
        return {"embed.weight": ("float32", (VOCAB_SIZE, 8))}

    def attach_core(self, core, boundary):
        """No update comes as calls."""

    def reset_mm_cache(self):
        """It has no ranks."""

    def reset_encoder_cache(self):
        """It has no encoder."""

    def shutdown(self):
        self.is_shut_down = True


def make_engine(
    codec=CODEC,
    *,
    max_num_seqs=16,
    max_model_len=128,
    seed=0,
    stat_loggers=(),
    spans=None,
    log_interval=10.0,
    async_scheduling=False,
    **fake,
):
    """An `LLMEngine` with its `core` and `executor` as attributes."""
    executor = FakeModel(max_model_len, **fake)
    core_config = CoreConfig(
        num_blocks=256,
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        vocab_size=VOCAB_SIZE,
        async_scheduling=async_scheduling,
    )
    config = EngineConfig(model="fake", skip_tokenizer_init=codec is None, seed=seed, log_interval=log_interval)
    info = EngineInfo(
        **{name: getattr(executor.info, name) for name in EngineInfo.__struct_fields__} | {"config": config}
    )
    client = LocalClient(EngineCore(executor, core_config), executor, info)
    engine = LLMEngine(Frontend(client, codec, spans=spans, loggers=stat_loggers))
    engine.core, engine.executor = client.driver.core, executor
    return engine
