"""Ghost norms are the norms of each example's gradient, model by model."""

import jax
import pytest

from optclip.per_example import _ghost
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
    return _ghost.plan(loss, params, example).kinds


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
    full = request.config.getoption("full")
    count = request.config.getoption("examples") or (2000 if full else 24)
    with jax.enable_x64(True):
        for seed in range(first, count, 4):
            loss, params, examples = random_losses.make(seed)
            try:
                per_example_oracle.check(loss, params, examples, rtol=1e-9)
            except AssertionError as error:
                raise AssertionError(f"The loss of the seed {seed}.") from error
            if seed % 100 > 95:
                jax.clear_caches()
