"""Outputs of random JSON schemas: each that ends validates, by another validator than what masks its tokens."""

import json
import random

import jsonschema
import llguidance
import pytest

from rollout_engine import LLM, SamplingParams
from rollout_engine.testing import tiny_checkpoint

LEAVES = [
    lambda rng: {"type": "string", "maxLength": rng.randint(1, 9)},
    lambda rng: {"type": "string", "pattern": rng.choice(["^[a-f]{2,5}$", "^x+y$", "^(on|off)$"])},
    lambda rng: {"type": "integer", "minimum": (low := rng.randint(-99, 50)), "maximum": low + rng.randint(0, 5000)},
    lambda rng: {"type": "number", "minimum": 0, "maximum": rng.randint(1, 100)},
    lambda rng: {"enum": rng.sample(["a", "ü", '"', 1, 2.5, None, True, [1], {"k": 0}], rng.randint(1, 5))},
    lambda rng: {"const": rng.choice(["c", 7, [], {"x": [None]}])},
    lambda rng: {"type": rng.choice([["boolean", "null"], "boolean", "null"])},
    lambda rng: {"type": "string", "format": rng.choice(["date", "uuid", "ipv4", "time"])},
]
BRANCHES = [
    lambda rng, deeper: {"type": "array", "items": deeper(), "minItems": rng.randint(0, 1), "maxItems": 3},
    lambda rng, deeper: {"type": "array", "prefixItems": [deeper(), deeper()], "items": False, "minItems": 2},
    lambda rng, deeper: {"anyOf": [deeper(), deeper()]},
    lambda rng, deeper: {"$ref": "#/$defs/shared"},
    lambda rng, deeper: {"allOf": [{"type": "object", "properties": {"a": deeper()}}, {"required": ["a"]}]},
]


def random_schema(seed):
    rng = random.Random(seed)

    def at(depth):
        if depth > 2 or rng.random() < 0.3:
            return rng.choice(LEAVES)(rng)
        if rng.random() < 0.5:
            return rng.choice(BRANCHES)(rng, lambda: at(depth + 1))
        names = rng.sample(["id", "name", "a b", "ü", "x/y"], rng.randint(1, 4))
        properties = {name: at(depth + 1) for name in names}
        required = rng.sample(names, rng.randint(0, len(names)))
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return at(0) | {"$defs": {"shared": at(3)}, "x-guidance": {"whitespace_flexible": rng.random() < 0.3}}


@pytest.mark.slow
@pytest.mark.parametrize("num_schemas", [16, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_output_that_ends_validates(tmp_path, num_schemas):
    schemas = [random_schema(seed) for seed in range(num_schemas)]
    problems = [llguidance.LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": s}]})) for s in schemas]
    assert not any(problems), [problem for problem in problems if problem]
    params = [
        SamplingParams(structured_outputs={"json": schema}, max_tokens=300, seed=seed, temperature=0.6)
        for seed, schema in enumerate(schemas)
    ]
    with LLM(tiny_checkpoint(tmp_path), num_kv_blocks=4096, max_num_seqs=64, log_stats=False) as llm:
        outputs = llm.generate(["x"] * num_schemas, params, use_tqdm=False)
    num_ended = 0
    for schema, output in zip(schemas, outputs, strict=True):
        [sample] = output.outputs
        assert sample.finish_reason in ("stop", "length"), (schema, sample.error)
        if sample.finish_reason == "stop":
            num_ended += 1
            jsonschema.Draft202012Validator(schema).validate(json.loads(sample.text))
    assert num_ended > 0.7 * num_schemas
