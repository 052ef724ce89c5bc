"""The adapter of TRL, driven by the real GRPOTrainer."""

import pytest

pytest.importorskip("trl")

from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from rollout_engine.testing import tiny_checkpoint  # noqa: E402

# TRL's own use of what it depends on.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def test_the_trainer_itself_runs_offline(checkpoint, tmp_path):
    args = GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=4,
        max_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(checkpoint),
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "one"}, {"prompt": "two"}]),
        processing_class=AutoTokenizer.from_pretrained(checkpoint),
    )
    assert trainer.train().global_step == 1
