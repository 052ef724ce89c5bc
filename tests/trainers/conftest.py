"""Shared by the tests of trainers' adapters."""

import os

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # `rollout_func` and asynchronous GRPO warn that they may change
