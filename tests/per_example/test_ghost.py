"""Ghost norms are the norms of each example's gradient, model by model."""

import jax
import pytest

from optclip.per_example._ghost._choice import choice_of
from tests.support import covering, example_losses, per_example_oracle, random_losses

KINDS = {
    "mlp": {"gram", "bias"},
    "cnn": {"gram", "bias", "materialized"},
    "transformer": {"gram", "embedding", "bias", "gain"},
    "tied_head": {"gram", "materialized", "bias", "gain"},
    "lora": {"materialized"},
    "lstm": {"gram", "product", "bias", "materialized"},
    "experts": {"gram", "bias", "product"},
    "nested": {"gram", "embedding", "product"},
}


def kinds_of(loss, params, examples):
    example = jax.tree.map(lambda x: x[0], examples)
    return choice_of(loss, params, example).kinds


@pytest.mark.parametrize("name", example_losses.MODELS)
def test_a_model_in_float32(name):
    per_example_oracle.check(*example_losses.MODELS[name]())


@pytest.mark.parametrize(
    "name", example_losses.MODELS if covering.full else ["cnn", "nested"]
)
def test_a_model_in_float64(name):
    loss, params, examples = example_losses.MODELS[name]()
    with jax.enable_x64(True):
        wide = map(per_example_oracle.widened, (params, examples))
        per_example_oracle.check(loss, *wide, rtol=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_done_about_the_leaves_of_a_model(name):
    kinds = kinds_of(*example_losses.MODELS[name]())
    assert set(jax.tree.leaves(kinds)) == KINDS[name]


@pytest.mark.parametrize("first", range(4))
def test_random_programs(request, first):
    count = request.config.getoption("examples") or (2000 if covering.full else 0)
    seeds = range(count) if count else random_losses.FEW
    with jax.enable_x64(True):
        for seed in seeds[first::4]:
            loss, params, examples = random_losses.make(seed)
            run = per_example_oracle.in_haste
            try:
                per_example_oracle.check(loss, params, examples, rtol=1e-9, run=run)
            except AssertionError as error:
                raise AssertionError(f"The loss of the seed {seed}.") from error
            if seed % 100 > 95:
                jax.clear_caches()


def test_a_few_random_programs_have_all_that_is_drawn():
    of_few, of_many = (
        set().union(*(random_losses.drawn(seed)[0].drawn for seed in seeds))
        for seeds in (random_losses.FEW, range(600))
    )
    assert of_few == of_many
    assert len(of_few) > 80
