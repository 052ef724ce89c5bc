"""Shared by the tests of trainers' adapters."""

import contextlib
import os
import warnings

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # `rollout_func` and asynchronous GRPO warn that they may change

# TorchRL warns of classes of its own when it is imported.
with warnings.catch_warnings(), contextlib.suppress(ImportError):
    warnings.simplefilter("ignore")
    import torchrl.collectors.llm  # noqa: F401
