"""Reading recipes: every way in gives the same object, and every mistake an error that names the nearest known
thing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationScheme, QuantizationStrategy
from helpers import modifier, recipe, weights
from omegaconf import OmegaConf

from lightning_compress.algorithms.gptq import Gptq
from lightning_compress.algorithms.rtn import Rtn
from lightning_compress.errors import RecipeError, RunWarning
from lightning_compress.recipe.config import Modifier, Recipe
from lightning_compress.recipe.load import config_dir, load_recipe, shipped_recipes

PLAIN = {
    "modifiers": [
        {"algorithm": "gptq", "scheme": {"weights": weights(3, group_size=128)}, "damping": 0.05, "ignore": ["lm_head"]}
    ]
}


def test_shipped_recipes() -> None:
    assert set(shipped_recipes()) >= {"w4a16_gptq", "w4a16_rtn", "w8a8_gptq", "w8a16_rtn", "w3a16_gptq"}
    for name in shipped_recipes():
        loaded = load_recipe(name)
        assert loaded.modifiers, name
        assert all(entry.scheme.weights is not None for entry in loaded.modifiers), name


@pytest.mark.parametrize(
    ("name", "algorithm", "num_bits", "inputs"),
    [
        ("w4a16_gptq", Gptq, 4, None),
        ("w4a16_rtn", Rtn, 4, None),
        ("w3a16_gptq", Gptq, 3, None),
        ("w4a16_best", Gptq, 4, None),
        ("w3a16_best", Gptq, 3, None),
        ("w2a16_best", Gptq, 2, None),
        ("w8a16_rtn", Rtn, 8, None),
        ("w8a8_gptq", Gptq, 8, 8),
        ("fp8_dynamic_rtn", Rtn, 8, 8),
        ("mxfp4a16_gptq", Gptq, 4, None),
        ("nvfp4a16_gptq", Gptq, 4, None),
        ("nvfp4_gptq", Gptq, 4, 4),
    ],
)
def test_shipped_recipes_are_what_their_names_say(
    name: str, algorithm: type, num_bits: int, inputs: int | None
) -> None:
    (entry,) = load_recipe(name).modifiers
    assert type(entry.algorithm) is algorithm
    assert entry.scheme.weights is not None
    assert entry.scheme.weights.num_bits == num_bits
    assert (entry.scheme.input_activations and entry.scheme.input_activations.num_bits) == inputs


def test_all_ways_in_agree(tmp_path: Path) -> None:
    expected = load_recipe(PLAIN)
    as_json, as_yaml = tmp_path / "mine.json", tmp_path / "mine.yaml"
    as_json.write_text(json.dumps(PLAIN))
    OmegaConf.save(OmegaConf.create(PLAIN), as_yaml)
    for given in (as_json, str(as_json), as_yaml, OmegaConf.create(PLAIN), expected, expected.to_dict()):
        assert load_recipe(given) == expected
    (entry,) = expected.modifiers
    assert entry.algorithm == Gptq(damping=0.05)
    assert entry.scheme.weights is not None
    assert (entry.scheme.weights.num_bits, entry.scheme.weights.group_size) == (3, 128)
    assert entry.scheme.weights.strategy == QuantizationStrategy.GROUP
    assert (entry.targets, entry.ignore) == (("Linear",), ("lm_head",))


@pytest.mark.parametrize("name", shipped_recipes())
def test_to_dict_says_everything(name: str) -> None:
    loaded = load_recipe(name)
    assert load_recipe(json.loads(json.dumps(loaded.to_dict()))) == loaded


def test_a_recipe_of_something_else_is_refused() -> None:
    """As Hydra instantiates a list of `_target_`s. Seen to fail: with a `StopIteration` where it is used."""
    with pytest.raises(RecipeError, match=r"DictConfig among its modifiers.*plain mappings, without `_target_`"):
        Recipe(OmegaConf.create([{"algorithm": "gptq"}]))  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"strength": 0.5}, {"ridge": 0.1}])
def test_options_of_a_correction_that_there_is_none_of_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(RecipeError, match=r"are of a correction, and there is none: give correct"):
        load_recipe(recipe(**options))


def test_objects_are_taken_as_they_are() -> None:
    scheme = QuantizationScheme.model_validate({"targets": [], "weights": weights(5)})
    built = Recipe((Modifier(Rtn(), scheme, targets=("re:.*mlp",)),))
    assert load_recipe(built) is built
    assert load_recipe({"modifiers": [built.modifiers[0]]}) == built
    assert load_recipe(recipe(5, "rtn", scheme=scheme, targets=["re:.*mlp"])) == built


def test_targets_inside_of_a_scheme_mean_nothing() -> None:
    """Seen to fail: schemes that differ in these alone were two, in the checkpoint too, and of modules with one input
    each had an FP8 scale of its own."""
    of_all, of_some = (
        Modifier(Rtn(), QuantizationScheme.model_validate({"targets": targets, "weights": weights(5)}))
        for targets in (["Linear"], ["re:.*q_proj"])
    )
    assert of_all.scheme == of_some.scheme


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda scheme: Modifier("rtn", scheme), r"such as Gptq\(\) or Rtn\(\), not 'rtn'\. By their names"),  # type: ignore[arg-type]
        (lambda scheme: Modifier(Rtn, scheme), "not <class"),  # type: ignore[arg-type]
        (lambda _: Modifier(Rtn(), "W4A16"), r"QuantizationScheme, not 'W4A16'\. By their names"),  # type: ignore[arg-type]
        (lambda scheme: Modifier(Rtn(), scheme, ignore="lm_head"), "`ignore` of a Modifier has to be a list"),  # type: ignore[arg-type]
        (lambda scheme: Modifier(Rtn(), scheme, targets=("re:*q_proj",)), "is no regular expression"),
        (lambda scheme: Recipe(Modifier(Rtn(), scheme)), "a list of modifiers, not a Modifier alone"),  # type: ignore[arg-type]
    ],
)
def test_objects_are_checked_as_mappings_are(make: Callable[[QuantizationScheme], object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make(QuantizationScheme.model_validate({"targets": [], "weights": weights(5)}))


@pytest.mark.parametrize("preset", ["W4A16", "w8a8"])
def test_presets_in_either_case(preset: str) -> None:
    (entry,) = load_recipe(recipe(scheme=preset)).modifiers
    assert entry.scheme.weights is not None


def test_a_preset_in_groups_of_another_size() -> None:
    """Also what resolves it says so: the scheme holds the size, and nothing else has changed."""
    shipped = OmegaConf.to_container(OmegaConf.load(config_dir() / "recipe" / "w4a16_gptq.yaml"))
    assert isinstance(shipped, dict)
    assert shipped["modifiers"][0].pop("group_size") is None, "a command can override it"
    (given,) = load_recipe({"modifiers": [{**shipped["modifiers"][0], "group_size": 64}]}).modifiers
    (preset,) = load_recipe("w4a16_gptq").modifiers
    assert given.scheme.weights is not None
    assert preset.scheme.weights is not None
    assert (preset.scheme.weights.group_size, given.scheme.weights.group_size) == (128, 64)
    changed = {"weights": given.scheme.weights.model_copy(update={"group_size": 128})}
    assert given.scheme.model_copy(update=changed) == preset.scheme
    assert load_recipe(Recipe((given,)).to_dict()) == Recipe((given,))


def test_loading_does_not_change_its_argument() -> None:
    given = recipe(4, targets=["Linear"])
    before = json.dumps(given)
    load_recipe(given)
    assert json.dumps(given) == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("w4a16_gtpq", r"no recipe named 'w4a16_gtpq'; did you mean 'w4a16_gptq'"),
        ("missing.yaml", "There is no recipe file missing.yaml"),
        ({"modifier": []}, r"Unknown key 'modifier' in the recipe; did you mean 'modifiers'"),
        ({}, "A recipe needs `modifiers`"),
        ({"modifiers": []}, "A recipe needs `modifiers`"),
        ({"modifiers": "gptq"}, "A recipe needs `modifiers`"),
        ({"modifiers": ["gptq"]}, "modifier 0 is a str"),
        (3, "this is a int"),
        (
            {"modifiers": [modifier(), modifier(algorithm="gtpq")]},
            r"modifier 1 has the unknown algorithm 'gtpq'; did you mean 'gptq'",
        ),
        ({"modifiers": [{"scheme": "W4A16"}]}, "unknown algorithm ''; known are gptq, rtn"),
        (recipe(ignored=["lm_head"]), r"Unknown key 'ignored' in modifier 0 \(gptq\); did you mean 'ignore'"),
        (recipe(blok_size=64), r"Unknown key 'blok_size' in modifier 0 \(gptq\); did you mean 'block_size'"),
        (recipe(algorithm="rtn", damping=0.1), r"Unknown key 'damping' in modifier 0 \(rtn\)"),
        (recipe(damping="much"), r"modifier 0 \(gptq\) has a bad option.*much"),
        (recipe(damping=2.0), "damping must be from 0 to 1"),
        (recipe(block_size=0), "block_size must be at least 1"),
        (recipe(scheme="W4A17"), r"unknown preset scheme 'W4A17'; did you mean 'W4A16'"),
        (
            recipe(scheme={"wieghts": weights()}),
            r"Unknown key 'wieghts' in the scheme of modifier 0; did you mean 'weights'",
        ),
        (
            recipe(scheme={"weights": {**weights(), "groop_size": 3}}),
            r"the scheme of modifier 0 is not valid: weights.groop_size is not known; did you mean 'group_size'",
        ),
        (
            recipe(scheme={"weights": {**weights(), "strategy": "rows"}}),
            "the scheme of modifier 0 is not valid: weights.strategy: [^\n]*'rows'[^\n]*$",
        ),
        (recipe(scheme=["W4A16"]), "modifier 0 needs a `scheme`"),
        ({"modifiers": [{"algorithm": "gptq"}]}, "modifier 0 needs a `scheme`"),
        (
            {"modifiers": [{"algorithm": "gptq", "scheme": "W4A16", "group_size": "64"}]},
            "modifier 0 has group_size '64'; it is a number",
        ),
        (
            {"modifiers": [{"algorithm": "gptq", "scheme": "W4A16", "group_size": 0}]},
            "modifier 0 has group_size 0; it is a number",
        ),
        (
            {"modifiers": [{"algorithm": "gptq", "scheme": "W8A8", "group_size": 64}]},
            "has group_size 64, but a scheme with weights of strategy channel",
        ),
        (recipe(targets="Linear"), "`targets` of modifier 0 has to be a list .* not 'Linear'"),
        (recipe(targets=["re:*q_proj"]), r"'re:\*q_proj' is no regular expression \(nothing to repeat"),
        (recipe(ignore=[3]), "`ignore` of modifier 0 has to be a list"),
    ],
)
def test_mistakes(given: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=r"(?s)" + message):
        load_recipe(given)


def test_one_scale_for_a_matrix_is_meant() -> None:
    """What puts fields in place of a preset's name loses its groups. Seen to fail: without a word."""
    with pytest.warns(RunWarning, match="modifier 0 name neither strategy nor group_size"):
        load_recipe(recipe(scheme={"weights": {"num_bits": 3}}))
    for meant in ({"strategy": "tensor"}, {"strategy": "channel"}, {"group_size": 32}):
        load_recipe(recipe(scheme={"weights": {"num_bits": 3, **meant}}))


def test_a_file_that_is_no_mapping(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("- gptq\n")
    with pytest.raises(RecipeError, match="does not hold a mapping"):
        load_recipe(path)


def test_a_file_that_is_no_yaml(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("modifiers: [{\n")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(path)
