"""A sweep over four rows that both these tests and their fixtures run, and what they read from its report."""

from rollout_engine import EvalTask

OPTIONS = dict(dtype="float32", num_kv_blocks=1024, max_model_len=256)
ROWS = [
    {"prompt": text, "letter": letter} for text, letter in zip(["one", "two", "three", "four"], "etao", strict=True)
]
SETTINGS = {"hot": {"max_tokens": 12}, "cool": {"max_tokens": 12, "temperature": 0.5}}


def has_letter(completions, letter):
    return [float(each in text) for text, each in zip(completions, letter, strict=True)]


TASK = EvalTask(name="letters", rows=ROWS, reward_fn=has_letter)


def evaluated(policy, tasks=TASK, **options):
    return policy.evaluate(tasks, **({"sweep": {"settings": SETTINGS}, "num_samples": 3, "use_tqdm": False} | options))


def essence(samples):
    """The values that have to be the same in an evaluation that was resumed."""
    return [
        (
            s["evaluation"],
            s["group_id"],
            s["sample_index"],
            s["seed"],
            s["response_token_ids"],
            s["log_probs"],
            s["reward"],
        )
        for s in samples
    ]


def row_of(report, metric, **where):
    [row] = [r for r in report.table if r["metric"] == metric and where.items() <= r.items()]
    return row
