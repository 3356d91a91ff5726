"""In `skip` no norm or loss enters its own threshold, for each rule."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import thresholds as T
from tests.support import helpers
from tests.support.running_rules import DIRECTION, RULES, seen

# Their threshold is a fraction of this step's norm, or of all norms of the step.
FRACTIONS = {"current": T.current(), "previous_norm": T.previous_norm(1.0)}
WARM = {"ema, warm to 1": T.ema(1.1, 0.5, warmup=3)}
OF_TREES = {
    "initial_norm": T.initial_norm(),
    "of_gradients": RULES["of_gradients"],
    "relative_to_params": T.relative_to_params(),
}
EACH = RULES | FRACTIONS | WARM | OF_TREES | {
    "of": T.of("max", T.quantile(1.0, 4)),
    "scaled": T.scaled(T.quantile(1.0, 4), 10.0),
}  # fmt: skip
LAST = np.float32([1e-3, 0.0, 1.0, 1e6, np.nan, np.inf])


@pytest.mark.parametrize("over", ["tree", "leaf"])
@pytest.mark.parametrize("name", EACH)
def test_threshold_of_skip_is_the_same_with_any_last_norm_and_loss(name, over):
    rule = EACH[name]
    limits = {"max_norm": rule} | ({} if name in OF_TREES else {"max_loss": rule})
    tx = optclip.skip(optax.identity(), **limits, over=over, record="leaves")
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}

    def step(state, size):
        def after(last):
            tree = {"a": size[0] * DIRECTION, "b": last * DIRECTION}
            new = tx.update(tree, state, params, value=last, gradients=tree)[1]
            metrics = optclip.metrics(new)
            return new, {k: x for k, x in metrics.items() if "threshold" in k}

        return after(size[1])[0], jax.vmap(lambda last: after(last)[1])(LAST)

    sizes = np.float32(np.random.default_rng(0).lognormal(size=(8, 2)))
    run = helpers.quick_jit(lambda: jax.lax.scan(step, tx.init(params), sizes)[1])
    found = np.stack(jax.tree.leaves(run()))
    is_same = (found == found[..., :1]).all()
    assert is_same != (name in FRACTIONS or (name in WARM and over == "leaf"))
    assert np.isfinite(found[:, -1]).all()
    if name in RULES.keys() - FRACTIONS:
        assert np.isinf(found[:, 0]).all()


@pytest.mark.parametrize("name", [x for x in EACH if x not in OF_TREES])
def test_rule_before_it_learns_returns_the_same_memory(name):
    rule = EACH[name]
    norms = np.random.default_rng(0).lognormal(size=(6, 2, 3))
    memory = rule.init({"a": jnp.zeros(3), "b": jnp.zeros(3)})
    for a, b in norms:
        step = seen({"a": a, "b": b})
        _, new = rule.update(step, memory)
        limits, same = rule.update(step._replace(includes_norm=False), memory)
        helpers.assert_identical(same, new)
        other = seen({"a": a, "b": 9 * b})._replace(includes_norm=False)
        if name not in FRACTIONS | WARM:
            helpers.assert_identical(rule.update(other, memory)[0], limits)
        memory = new
