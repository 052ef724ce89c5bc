"""Lines of rollouts as a log has them, made up."""

import json
import random

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)> \x1b[31m\u202e &amp; \N{GRINNING FACE}"


def rollouts(num_groups, num_samples, *, seed=0, num_tokens=30):
    """Samples group by group, as dicts."""
    draws = random.Random(seed)
    return [_sample(draws, group, index, num_tokens) for group in range(num_groups) for index in range(num_samples)]


def _sample(draws, group, index, num_tokens):
    length = draws.randint(1, num_tokens)
    ids = [draws.randint(0, 200) for _ in range(length)]
    return {
        "group_id": group,
        "sample_index": index,
        "seed": 2**64 - 1 - group,
        "finish_reason": draws.choice(["stop", "length"]),
        "truncated": False,
        "prompt": f"question {group}",
        "response": f"answer {index} " + "word " * length,
        "prompt_token_ids": [1, 2, group],
        "response_token_ids": ids,
        "log_probs": [-draws.random() for _ in ids],
        "policy_version": [group // 2] * length,
        "kv_min_version": [group // 2] * length,
        "reward": draws.random(),
        "done": True,
        "columns": {"answer": group},
    }


def write_lines(path, samples):
    """Write a file of rollouts, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
    return path
