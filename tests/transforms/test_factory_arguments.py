"""Arguments that `clip_by` and the `clip_by_*` functions reject."""

import jax
import numpy as np
import pytest

import optclip
from tests.support import helpers

ONES = np.ones(3, np.float32)
LABELS = {"a": "x"}


# Each factory with the further arguments that it needs.
FACTORIES = {
    "clip_by": (),
    "clip_by_average_norm": (),
    "clip_by_global_norm": (),
    "clip_by_group_norm": (LABELS,),
    "clip_by_norm": (),
    "clip_by_rms": (),
    "clip_by_singular_value": (),
    "clip_by_spectral_norm": (),
    "clip_by_value": (),
}
# These accept arrays of thresholds, unless some are negative.
OF_ARRAYS = ("clip_by_singular_value", "clip_by_spectral_norm", "clip_by_value")
GRADIENTS = [
    (name, gradients)
    for name in FACTORIES
    for gradients in (-ONES, [-ONES], {"a": -ONES}, {"a": ONES})
    if name not in OF_ARRAYS or np.any(jax.tree.leaves(gradients)[0] < 0)
]


@pytest.mark.parametrize(("name", "gradients"), GRADIENTS)
def test_factory_of_gradients_raises_with_pure_call(name, gradients):
    call = rf"directly, call optclip\.functional\.{name}\(updates, \.\.\.\)\.$"
    with pytest.raises(ValueError if name in OF_ARRAYS else TypeError, match=call):
        getattr(optclip, name)(gradients, *FACTORIES[name])


@pytest.mark.parametrize("name", FACTORIES)
def test_factory_of_positions_of_pure_function_raises_with_pure_call(name):
    call = rf"got \d arg.* call optclip\.functional\.{name}\(updates, [a-z_, ]+\)\.$"
    with pytest.raises(TypeError, match=call):
        getattr(optclip, name)({"a": ONES}, 1.0, *FACTORIES[name])


@pytest.mark.parametrize("name", OF_ARRAYS)
def test_factory_of_array_of_thresholds_applies_them(name):
    limits = np.ones((3, 1, 1) if "spectral" in name else 3, np.float32)
    eyes = np.stack([np.eye(3, dtype=np.float32)] * 3)
    tx = getattr(optclip, name)({"a": limits})
    clipped, _ = helpers.quick_jit(tx.update)({"a": 3 * eyes}, tx.init({"a": eyes}))
    np.testing.assert_allclose(clipped["a"], eyes, atol=1e-6)


F = optclip.functional
FOREIGN_KEYWORDS = [
    (F.clip_by_global_norm, "clip_norm", "Use max_norm= instead"),
    (F.clip_by_global_norm, "t_list", "Use tree= instead"),
    (F.clip_by_global_norm, "norm_type", "Use ord= instead"),
    (F.clip_by_global_norm, "error_if_nonfinite", 'Use nonfinite="raise" inside check'),
    (F.clip_by_global_norm, "foreach", "Remove it: XLA"),
    (F.clip_by_norm, "axes", "Use axis= instead"),
    (F.clip_by_norm, "name", "Remove it: a function has no record"),
    (F.clip_by_average_norm, "clip_norm", "Use max_norm= instead"),
    (F.clip_by_value, "clip_value_min", "Use lower= instead"),
    (F.clip_by_value, "clip_value_max", "Use upper= instead"),
    (F.clip_by_spectral_norm, "max_nrom", "Did you mean max_norm="),
    (F.global_norm, "zzz", "Its arguments are axis_name, mask, ord, tree"),
    (optclip.clip_by_global_norm, "global_clipnorm", "Use max_norm= instead"),
    (
        optclip.clip_by_global_norm,
        "t_list",
        r"call optclip.functional.clip_by_global_n",
    ),
    (optclip.clip_by_norm, "clipnorm", "Use max_norm= instead"),
    (optclip.clip_by_norm, "over", r"Use clip_by\(\.\.\., over=\.\.\.\)"),
    (optclip.clip_by_value, "clipvalue", "Use limit= instead"),
    (optclip.clip_by_value, "max_delta", "Use limit= instead"),
    (optclip.clip_by_rms, "threshold", "Use max_rms= instead"),
    (optclip.per_example.clipped_grad, "l2_clip_norm", "Use threshold= instead"),
]


@pytest.mark.parametrize(("function", "keyword", "words"), FOREIGN_KEYWORDS)
def test_keyword_of_another_library_names_ours(function, keyword, words):
    message = rf"{function.__name__}\(\) has no argument '{keyword}'.* {words}"
    with pytest.raises(TypeError, match=message):
        function(**{keyword: 1.0})


def test_tensor_of_another_library_is_rejected_with_its_conversion(monkeypatch):
    """`tests/integration/parity` passes tensors of TensorFlow."""

    class Tensor:
        dtype, shape = "float32", (2,)

    fixes = {"torch.nn": "from_dlpack", "keras.src": "value", "tensorflow.a": "numpy"}
    for module, fix in fixes.items():
        monkeypatch.setattr(Tensor, "__module__", module)
        for call in (
            lambda: F.clip_by_global_norm({"w": Tensor()}, 1.0),
            lambda: F.clip_by_value([Tensor()], 1.0),
            lambda: F.clip_by_norm(ONES, Tensor()),
            lambda: optclip.clip_by_norm(1.0).init([Tensor()]),
            lambda: optclip.clip_by_global_norm(Tensor()),
            lambda: optclip.per_example.clipped_sum([Tensor()], 1.0),
        ):
            with pytest.raises(TypeError, match=rf"must be .* got .*{fix}"):
                call()
