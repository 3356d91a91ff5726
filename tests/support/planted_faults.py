"""List faults that the suite must find, and plant them in a copy of the package.

Each fault replaces a text, which occurs once in its file, by another; the tests of its
file must then fail. A change of the package that moves such a text updates its row.

    python -m tests.support.planted_faults            # plant all of them
    python -m tests.support.planted_faults _wrappers  # those in paths with this text
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]


class Fault(NamedTuple):
    """Hold a fault: its file, the text before and after, and a test that finds it."""

    file: str
    before: str
    after: str
    test: str


FAULTS = [
    # States that move.
    Fault(
        "_wrappers/_addresses.py",
        "for row, leaves in enumerate(below):",
        "for row, leaves in enumerate(below[::-1]):",
        "wrappers/test_carry_over.py",
    ),
    Fault(
        "_wrappers/_carrier.py",
        "here = [old for old in sources if old in givers or not givers]",
        "here = sources",
        "wrappers/test_carry_over.py",
    ),
    Fault(
        "_wrappers/_carrier.py",
        "if overlap >= 0.5 and place",
        "if overlap >= 0.1 and place",
        "wrappers/test_carry_over.py",
    ),
    Fault(
        "_wrappers/_carrier.py",
        "if len(olds) == len(news) and are_ordered:",
        "if state in news[: len(olds)]:",
        "wrappers/test_carry_over.py",
    ),
    # The core: norms, thresholds, coefficients and elements.
    Fault(
        "_clip/_scale.py",
        "coefficient = select(is_positive, coefficient, of_zero) + alarm",
        "coefficient = select(is_positive, coefficient, of_zero)",
        "clip/test_nonfinite.py",
    ),
    Fault(
        "_clip/_scale.py",
        "is_zeroed = ~is_finite & jnp.isfinite(threshold)",
        "is_zeroed = ~is_finite",
        "clip/test_nonfinite.py",
    ),
    Fault(
        "_clip/_scale.py",
        "upper, lower = threshold * (1 - band), threshold * (1 - 2 * band)",
        "upper, lower = threshold * (1 + band), threshold * (1 + 2 * band)",
        "contracts/test_values.py",
    ),
    Fault(
        "_clip/_scale.py",
        "divisor = divisor + select(added < 0, jnp.zeros_like(added), added)",
        "divisor = divisor + added",
        "clip/test_strict.py",
    ),
    Fault(
        "_clip/_clip.py",
        "return select((limit < least) & (limit != 0), jnp.zeros_like(limit), limit)",
        "return limit",
        "clip/test_strict.py",
    ),
    Fault(
        "_clip/_bounded.py",
        "x = jnp.where(~is_off & ~jnp.isfinite(x), jnp.zeros_like(x), x)",
        "x = jnp.where(~jnp.isfinite(x), jnp.zeros_like(x), x)",
        "clip/test_nonfinite.py",
    ),
    Fault(
        "_clip/_move.py",
        "return jnp.where(jnp.asarray(leaf.array) < 0, lower, upper)",
        "return jnp.where(jnp.asarray(leaf.array) < 0, upper, lower)",
        "clip/test_bounds.py",
    ),
    Fault(
        "_norms/_sums.py",
        "return squares[0] if len(squares) == 1 else squares[0] + squares[1]",
        "return squares[0]",
        "arrays/test_leaf_kinds.py",
    ),
    Fault(
        "_norms/_sums.py",
        "merge = lax.max if self.ord == math.inf else lax.add",
        "merge = lax.add",
        "clip/test_compiled.py",
    ),
    Fault(
        "_norms/_sums.py",
        "is_guarded = plan.ord == 2 and plan.guarded",
        "is_guarded = False",
        "contracts/test_properties.py",
    ),
    Fault(
        "_responses/_responses.py",
        "inside = norm <= threshold\n        one = jnp.ones_like(norm)\n"
        "        return select",
        "inside = norm > threshold\n        one = jnp.ones_like(norm)\n"
        "        return select",
        "responses/test_responses.py",
    ),
    Fault(
        "_responses/_response_argument.py",
        "return jax.lax.stop_gradient(self.response.coefficient(norm, threshold))",
        "return self.response.coefficient(norm, threshold)",
        "responses/test_responses.py",
    ),
    Fault(
        "_thresholds/_window_rules.py",
        "jax.tree.map(lambda index: (index + 1) % length, window.next)",
        "jax.tree.map(lambda index: index + 1, window.next)",
        "thresholds/test_running.py",
    ),
    Fault(
        "_thresholds/_window_rules.py",
        "jax.tree.map(lambda n: jnp.minimum(n + 1, length), window.num_known)",
        "jax.tree.map(lambda n: n + 1, window.num_known)",
        "thresholds/test_running.py",
    ),
    Fault(
        "_thresholds/_window_rules.py",
        "freedom = jnp.maximum(count - ddof, 1).astype(ring.dtype)",
        "freedom = jnp.maximum(count, 1).astype(ring.dtype)",
        "thresholds/test_running.py",
    ),
    Fault(
        "_thresholds/_average_rules.py",
        "mixed = select(step < self.warmup, jnp.minimum(old, new), mixed)",
        "mixed = select(step < self.warmup, jnp.maximum(old, new), mixed)",
        "thresholds/test_running.py",
    ),
    # Wrappers.
    Fault(
        "_wrappers/_skip.py",
        "is_nonfinite = is_nonfinite | ~jnp.isfinite(loss)",
        "is_nonfinite = is_nonfinite",
        "wrappers/test_skip.py",
    ),
    Fault(
        "_wrappers/_skip.py",
        "is_off & (in_a_row < most)",
        "is_off & (in_a_row <= most)",
        "wrappers/test_skip.py",
    ),
    Fault(
        "_wrappers/_skip.py",
        "_select_tree(skipped, state.skip_inner, inner_state)",
        "inner_state",
        "wrappers/test_skip.py",
    ),
    Fault(
        "_wrappers/_error_feedback.py",
        "None if residual is None else _finite_or(t - _leaves.widen(u), residual)",
        "None if residual is None else _finite_or(t, residual)",
        "wrappers/test_wrappers.py",
    ),
    Fault(
        "_wrappers/_periodic_reset.py",
        "is_due = phase == 0",
        "is_due = phase == 1",
        "wrappers/test_wrappers.py",
    ),
    Fault(
        "_wrappers/_constrain.py",
        "is_kept = (clipped == new) | ~jnp.isfinite(new) | ~jnp.isfinite(clipped)",
        "is_kept = clipped == new",
        "wrappers/test_constrain.py",
    ),
    Fault(
        "_wrappers/_with_history.py",
        "at = count % rows.shape[0]",
        "at = count % (rows.shape[0] + 1)",
        "wrappers/test_with_history.py",
    ),
    # Examples.
    Fault(
        "_per_example/_clip_then_sum.py",
        "summed = lax.psum(summed, source.axes) if source.axes else summed",
        "summed = lax.pmean(summed, source.axes) if source.axes else summed",
        "distributed/test_example_meshes.py",
    ),
    Fault(
        "_per_example/_bound.py",
        "factor = jnp.clip(factor, -most, most)",
        "factor = jnp.minimum(factor, most)",
        "per_example/test_clipped_grad.py",
    ),
    Fault(
        "_per_example/_bound.py",
        '"add_or_remove": 1, "zero_out": 1, "replace_one": 2,',
        '"add_or_remove": 1, "zero_out": 1, "replace_one": 1,',
        "per_example/test_sensitivity.py",
    ),
    Fault(
        "_per_example/_quantile_threshold.py",
        "step = jnp.exp(-rate * (fraction - wanted))",
        "step = jnp.exp(rate * (fraction - wanted))",
        "per_example/test_quantile_threshold.py",
    ),
    Fault(
        "_per_example/_quantile_threshold.py",
        "below = live & (norms <= threshold)",
        "below = norms <= threshold",
        "per_example/test_quantile_threshold.py",
    ),
    # Matrices.
    Fault(
        "_spectral/_newton_schulz.py",
        "return jnp.sum(size * size, (-2, -1), keepdims=True) ** 0.25",
        "return jnp.sum(size * size, (-2, -1), keepdims=True) ** 0.2",
        "spectral/test_singular_values.py",
    ),
    Fault(
        "_spectral/_newton_schulz.py",
        "inside = (g + least + (modulus + adjoint(modulus)) / 2) / 2",
        "inside = (g + least + (modulus + adjoint(modulus)) / 2) / 3",
        "spectral/test_singular_values.py",
    ),
    # Cotangents and attention.
    Fault(
        "_cotangents/_probe.py",
        "collective = lax.pmax if field in _LARGEST else lax.psum",
        "collective = lax.pmax",
        "distributed/test_cotangent_meshes.py",
    ),
    Fault(
        "_cotangents/_probe.py",
        "*(jnp.maximum(a, b) if f in _LARGEST else a + b for f, a, b in pairs)",
        "*(a + b for f, a, b in pairs)",
        "cotangents/test_probe.py",
    ),
    Fault(
        "_cotangents/_relative_threshold.py",
        "last = norms.size - 1 - zeros",
        "last = norms.size - 1",
        "cotangents/test_clip_cotangent.py",
    ),
    Fault(
        "_attention/_qk_scaling.py",
        "least = jnp.min(grouped, -1, keepdims=True)",
        "least = jnp.max(grouped, -1, keepdims=True)",
        "attention/test_clip_attention_logits.py",
    ),
    # Recipes.
    Fault(
        "_recipes/_optimizers.py",
        "correction = -jnp.expm1(count.astype(dtype) * log)",
        "correction = 1.0",
        "recipes/test_methods.py",
    ),
    Fault(
        "_recipes/_optimizers.py",
        "last = rate_after(jnp.asarray(warmup, step.dtype))",
        "last = rate_after(jnp.asarray(warmup + 1, step.dtype))",
        "recipes/test_recipes.py",
    ),
    Fault(
        "_recipes/_gradient_clipping.py",
        'threshold = thresholds.ema(high, decay, warmup=0, start="zero")',
        "threshold = thresholds.ema(high, decay, warmup=0)",
        "recipes/test_official.py",
    ),
    # The record and what reads it.
    Fault(
        "_monitor/_suggest.py",
        "exact = float(norms[-1 - count]) if count < len(norms) else 0.0",
        "exact = float(norms[count]) if count < len(norms) else 0.0",
        "monitor/test_suggest.py",
    ),
    Fault(
        "_monitor/_verdict.py",
        "if not rows.any() or (rows & ~run.explained).any():",
        "if True:",
        "monitor/test_summary.py",
    ),
    Fault(
        "_monitor/_outliers.py",
        "np.flatnonzero(steps >= gap)[::-1]",
        "np.flatnonzero(steps >= 0)[::-1]",
        "monitor/test_situations.py",
    ),
    Fault(
        "_explain/_attribution.py",
        "return parts / total if 0 < total < np.inf else None",
        "return parts / np.sum(np.abs(parts))",
        "explain/test_explain.py",
    ),
    Fault(
        "_explain/_attribution.py",
        "return jnp.conj(grad / largest)",
        "return grad / largest",
        "explain/test_explain.py",
    ),
    Fault(
        "_explain/_findings.py",
        "if fraction > max(0.5, 2 / part.shape[part.axis]):",
        "if fraction > 0:",
        "explain/test_explain.py",
    ),
    Fault(
        "_monitor/_run.py",
        "if isinstance(x, bool):",
        "if False:",
        "report/test_report.py",
    ),
    Fault(
        "_explain/_recorded.py",
        "has_run(clips, name) & (np.diff(steps, prepend=-1) != 0)",
        "has_run(clips, name)",
        "explain/test_recorded_step.py",
    ),
    Fault(
        "_explain/_comparison.py",
        "tolerance = times * _TOLERANCE[key[0]]",
        "tolerance = 0.99",
        "explain/test_recorded_step.py",
    ),
    Fault(
        "_report/_entries.py",
        "row.keys() & latest[at].keys() & read",
        "row.keys() & read",
        "report/test_report.py",
    ),
]


def source_of(fault: Fault) -> str:
    return (CHECKOUT / "optclip" / fault.file).read_text()


def is_found(fault: Fault) -> bool:
    """Plant a fault in a copy of the package; return whether its test fails."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        ignored = shutil.ignore_patterns("__pycache__")
        for name in ("optclip", "tests", "tools", "docs"):
            shutil.copytree(CHECKOUT / name, copy / name, ignore=ignored)
        for path in CHECKOUT.iterdir():
            if path.is_file() and not path.is_symlink():
                shutil.copy(path, copy)
        assert source_of(fault).count(fault.before) == 1, fault
        (copy / "optclip" / fault.file).write_text(
            source_of(fault).replace(fault.before, fault.after)
        )
        # Share the compilation cache: most programs do not depend on the fault.
        (CHECKOUT / ".jax_cache").mkdir(exist_ok=True)
        os.symlink(CHECKOUT / ".jax_cache", copy / ".jax_cache")
        # The folder is first on the path, before the installed package.
        command = [sys.executable, "-m", "pytest", "-q", "-x", f"tests/{fault.test}"]
        env = os.environ | {"PYTHONPATH": str(copy)}
        done = subprocess.run(
            command, cwd=copy, env=env, capture_output=True, text=True
        )
        if done.returncode not in (0, 1):
            raise RuntimeError(done.stdout + done.stderr)
        return done.returncode == 1


if __name__ == "__main__":
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    missed = []
    for each in FAULTS:
        if wanted not in each.file:
            continue
        found = is_found(each)
        missed += [] if found else [each]
        print("found " if found else "MISSED", each.file, each.after, flush=True)
    sys.exit(bool(missed))
