"""Log-probs of samples whose tokens were drawn under several versions of the weights, compared with the trainer's."""

import numpy as np
import torch

from rollout_engine import exact
from tests.drawn_pictures import Drawn, batch_of


@torch.no_grad()
def compare(outputs, model_of, temperature, counts):
    """Count the log-probs of outputs, and those that differ from the trainer's with the weights of their version.

    `model_of`: version -> exact model. `counts`: adds to "compared", "wrong", and "across": samples of two versions.
    """
    samples = [(list(output.prompt_token_ids), sample) for output in outputs for sample in output.outputs]
    pictures = [tuple(output.pictures) for output in outputs for _ in output.outputs]
    rows = [
        Drawn(prompt + list(sample.token_ids), each) for (prompt, sample), each in zip(samples, pictures, strict=True)
    ]
    batch = batch_of(rows)
    versions = {span.policy_version for _, sample in samples for span in sample.version_spans}
    of_version = {
        version: exact.token_logprobs(model_of(version), batch, temperature=temperature).numpy()
        for version in sorted(versions)
    }
    for row, (prompt, sample) in enumerate(samples):
        counts["across"] += len(sample.version_spans) > 1
        for span in sample.version_spans:
            assert span.kv_min_version == span.policy_version
            first = len(prompt) - 1
            mine = sample.logprobs[span.start : span.end]
            right = of_version[span.policy_version][row, first + span.start : first + span.end]
            counts["compared"] += len(mine)
            counts["wrong"] += int((mine.view(np.int32) != right.view(np.int32)).sum())
