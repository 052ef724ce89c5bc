"""The positions at which a configuration may change what its model computes."""

from rollout_engine.model.modules.positions import far_starts, position_limit
from rollout_engine.testing import tiny_config


def crossed(start, boundary, num_tokens=8):
    return start < boundary < start + num_tokens


def test_starts_cross_every_whole_number_of_a_configuration_at_any_depth():
    config = tiny_config("ministral3", max_position_embeddings=5_000, vocab_size=700, sliding_window=90)
    config.of_any_name = [{"deep": 1_234.0}, 3.5, True, float("inf"), "x", None]
    config.rope_parameters["original_max_position_embeddings"] = 333
    starts = far_starts(config, 8)
    for boundary in (90, 333, 700, 1_234):
        assert any(crossed(start, boundary) for start in starts), boundary
    assert starts == sorted(starts)
    assert starts[-1] == 5_000 - 8


def test_no_start_is_beyond_the_positions_that_do_not_depend_on_the_batch():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    config = tiny_config("llama", rope_parameters=rope, max_position_embeddings=100, vocab_size=700)
    assert far_starts(config, 8)[-1] + 8 == position_limit(config) == 100
    assert far_starts(config, 8, end=60)[-1] + 8 == 60


def test_a_model_of_few_positions_has_no_far_ones():
    assert far_starts(tiny_config("llama", max_position_embeddings=8), 8) == []
