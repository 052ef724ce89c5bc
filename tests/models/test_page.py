"""docs/models.md is what results.json says, and results.json names the types that the tests prove."""

import pytest
import transformers

from rollout_engine.model.loading.type_aliases import ALIASES
from rollout_engine.testing.architectures import ALL_SIZES, VARIANTS
from tests.integration import test_composites
from tests.integration.composites import COMPOSITES
from tests.models import results
from tests.models.page import PAGE, updated
from tests.models.published import PUBLISHED
from tests.models.tiny import all_names, kind_of, sizes_of
from tests.parity import test_bits, test_ranks

ROWS = results.read()
OWN = {name: row for name, row in ROWS.items() if row["sizes"] == "own" and row["kind"] == "type"}
MIXTURES = {name: is_compiled for name, is_compiled in test_bits.MIXTURES.items() if name not in VARIANTS}
ADVICE = "run `python -m tests.models TYPE` for each, and read what changed"


def own(*outcomes, column="float32"):
    """Types with sizes of their own that have one of these outcomes."""
    return set(results.names_of(OWN, "type", *outcomes, column=column))


def test_the_page_is_what_the_command_writes():
    text = PAGE.read_text(encoding="utf-8")
    assert text == updated(text, ROWS), "run `python -m tests.models --page`"


def test_a_page_without_a_place_for_a_table_is_refused():
    with pytest.raises(ValueError, match="begin: composites"):
        updated("<!-- begin: types -->\n<!-- end: types -->\n", ROWS)


def test_every_row_is_whole_and_none_is_a_fault():
    assert not {name: results.missing_parts(row) for name, row in ROWS.items() if results.missing_parts(row)}
    assert not [(name, found) for name, row in ROWS.items() for found in row.values() if found.startswith("wrong")]
    assert not results.names_of(ROWS, "type", "differ", column="gradients")
    assert len({row["made_with"].partition(",")[0] for row in ROWS.values()}) == 1, "rows of two releases"


def test_kinds_and_sizes_are_those_of_today():
    stale = [name for name, row in ROWS.items() if (row["kind"], row["sizes"]) != (kind_of(name), sizes_of(name))]
    assert not stale, ADVICE
    assert OWN.keys() == ALL_SIZES.keys() and ROWS.keys() >= COMPOSITES.keys(), ADVICE


@pytest.mark.skipif(
    f"transformers {transformers.__version__}" not in {row["made_with"].partition(",")[0] for row in ROWS.values()},
    reason="another release has other types",
)
def test_every_causal_lm_of_transformers_has_a_row():
    assert list(ROWS) == all_names(), ADVICE


def test_types_are_exact_as_the_parity_tests_prove_them_to_be():
    assert own("exact") == ALL_SIZES.keys() - test_bits.NOT_EXACT, ADVICE
    assert own("round-off") == test_bits.NOT_EXACT, ADVICE
    assert own("exact", column="bfloat16") >= {*test_bits.ARCHITECTURES, *MIXTURES}, ADVICE
    compiled = test_bits.COMPILED | {name for name, is_compiled in MIXTURES.items() if is_compiled}
    modules = {name for name, is_compiled in MIXTURES.items() if not is_compiled}
    assert own("one call", column="layers") >= compiled and own("modules", column="layers") >= modules, ADVICE


def test_ranks_and_devices_are_those_of_their_tests():
    assert own("equal", column="ranks") >= {*test_ranks.FUZZED, *test_ranks.OTHERS}, ADVICE
    assert own("exact", column="device") >= {"llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"}, ADVICE


def test_composites_are_refused_as_their_tests_say():
    assert set(results.names_of(ROWS, "composite", "refused")) == test_composites.REFUSED.keys(), ADVICE
    assert set(results.names_of(ROWS, "composite", "exact")) == COMPOSITES.keys() - test_composites.REFUSED.keys()


def test_published_models_are_proved_with_sizes_of_their_own():
    exact = results.names_of(ROWS, "type", *results.SERVED)
    assert not [name for name in exact if name in PUBLISHED and ROWS[name]["sizes"] == "generic"]


def test_published_models_and_aliases_are_of_types_with_a_row():
    assert PUBLISHED.keys() <= ROWS.keys() | ALIASES.keys()
    assert {alias.model_type for alias in ALIASES.values()} <= set(results.names_of(ROWS, "type", "exact"))


@pytest.mark.parametrize(
    ("found", "outcome", "reason"),
    [
        ("exact", "exact", ""),
        ("refused: A (model_type 'a') cannot be served exactly: it is odd.", "refused", "it is odd"),
        ("round-off: A cannot be exact: 2 of its parts: x.", "round-off", "2 of its parts: x"),
    ],
)
def test_an_outcome_is_told_from_its_reason(found, outcome, reason):
    assert (results.outcome_of(found), results.reason_of(found)) == (outcome, reason)


def test_rows_are_read_as_they_were_written(tmp_path):
    rows = {"b": {"kind": "type", "float32": "untried: x"}, "a": {"kind": "type", "float32": "exact"}}
    results.write(rows, tmp_path / "rows.json")
    assert results.read(tmp_path / "rows.json") == rows and results.read(tmp_path / "none.json") == {}
    assert [results.missing_parts(rows[name]) for name in "ba"] == [[], ["bits", "gradients", "ranks", "device"]]
    lines = (tmp_path / "rows.json").read_text().splitlines()
    assert len(lines) == 4 and lines[1].startswith('"a"')
