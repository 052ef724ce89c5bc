"""A logits processor that takes for ever to be made: it holds a core in the middle of its start."""

import os
import time
from pathlib import Path

BEGUN = "ROLLOUT_ENGINE_TEST_BEGUN"
"""Environment variable with the path of a file that is made once the wait has begun."""


class Slow:
    def __init__(self, vocab_size):
        Path(os.environ[BEGUN]).touch()
        while True:
            time.sleep(60)

    def wants(self, params):
        return False

    def apply(self, logits, sequence):
        return logits
