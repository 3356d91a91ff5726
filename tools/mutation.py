"""Faults put into optclip one by one: does a test notice each?

    python -m tools.mutation                            # all modules, an hour or two on 2 cores
    python -m tools.mutation norms/_roots scopes/_axes  # some

Cosmic-ray makes the mutants, each in a copy of the checkout. A mutant that no test
notices is printed with its line, or counted with the reason in `EQUIVALENT`.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOAL = 0.95

API = "registry::test_the_public_api_is_as_written"

GHOST = (
    "ghost_memory ghost_places ghost_range ghost::test_a_model_in_float32"
    " ghost::test_what_is_done_about_the_leaves_of_a_model ghost::test_random_programs"
)

# Which tests are to notice a fault in which module, the quickest first.
TESTS = {
    "norms/_norm": "norms bad_input sparse",
    "norms/_measure": "norms bad_input sparse sharding mapped::test_untyped_must_be_declared",
    "norms/_spectral": f"{API} matrices power_iteration bad_input",
    "norms/_matrices": "singular_values matrices singular_value_leaves matrix_meshes",
    "norms/_power_iteration": "power_iteration",
    "scopes/_matrices": f"{API} matrices bad_input",
    "_clip/_factors": "singular_values singular_value_derivatives",
    "_clip/_spectrum": "singular_values singular_value_derivatives",
    "_clip/_newton_schulz": "singular_values singular_value_derivatives",
    "_clip/_singular_values": "singular_value_leaves singular_values",
    "_clip/_kinds": "matrices bounds",
    "transforms/_lift": "without_state clip_by clip_logits_last",
    "transforms/_matrices": "named registry bad_input matrices power_iteration",
    "transforms/_norm_memory": "power_iteration",
    "transforms/_scale_by_shape": "spectra"
    " matrix_meshes::test_in_shard_map_spectra_scales_by_the_shape_of_the_whole",
    "functional/_matrices": "singular_values matrices bad_input",
    "responses/_norms": "responses derivatives_edges",
    "responses/_resolve": "responses bad_answers detached",
    "functional/_clip_by": "functional bad_input masks",
    "cotangents/_clip_cotangent": f"{API} clip_cotangent relative_cotangents bad_input",
    "cotangents/_backward": "clip_cotangent probe relative_cotangents cotangent_meshes",
    "cotangents/_chosen": "clip_cotangent probe",
    "cotangents/_layers": "clip_cotangent bad_input",
    "cotangents/_probe": f"{API} probe cotangent_meshes",
    "cotangents/_relative": "relative_cotangents cotangent_meshes bad_input",
    "monitor/_cotangents": "probe",
    "per_example/_bound": f"{API} clipped_grad sensitivity bad_input",
    "per_example/_microbatches": "no_example clipped_grad sensitivity example_meshes",
    "per_example/_loss": "clipped_grad example_meshes bad_input",
    "per_example/_weighted": "ghost_sum",
    "per_example/_method": f"{API} no_example ghost_sum example_meshes",
    "per_example/_source": "no_example clipped_grad bad_input",
    "per_example/_jaxprs": "ghost_custom_vjp example_meshes",
    "per_example/_ghost/_backward": f"{GHOST} ghost_sum ghost_custom_vjp",
    "per_example/_ghost/_choice": f"{GHOST} ghost_sum",
    "per_example/_ghost/_formulas": GHOST,
    "per_example/_ghost/_plan": GHOST,
    "per_example/_ghost/_sites": GHOST,
    "per_example/_ghost/_squares": f"{GHOST} ghost_sum",
    "per_example/_ghost/_walk": GHOST,
    "per_example/_responses": f"{API} clipped_grad bad_input",
    "per_example/_sum": "clipped_grad example_meshes bad_input",
    "per_example/_clipped_grad": f"{API} clipped_grad bad_input",
    "per_example/_clipped_sum": f"{API} clipped_grad bad_input",
    "per_example/_norms": f"{API} no_example clipped_grad bad_input",
    "per_example/_quantile": f"{API} quantile_of_examples bad_input",
    "per_example/_info": f"{API} clipped_grad",
    "functional/_leaf_norms": "functional bad_input masks",
    "functional/_tree_norms": "functional bad_input masks",
    "functional/_values": "registry bounds functional bad_input masks",
    "transforms/_leaf_norms": "named registry bad_input record metrics",
    "transforms/_tree_norms": "named registry bad_input record metrics",
    "transforms/_values": "named registry bad_input values",
    "_arrays/_numerics": "norms accuracy::test_norms_of_every_size derivatives_edges",
    "norms/_sums": "norms accuracy::test_norms_of_every_size compiled sharding",
    "_clip/_scale": "compiled::test_an_eager_coefficient_is_one_program strict"
    " functional responses nonfinite sparse norms derivatives_edges values",
    "norms/_roots": "norms sparse accuracy::test_norms_of_every_dtype derivatives_edges"
    " mapped::test_out_of_range_on_one_device",
    "norms/_totals": "norms accuracy::test_norms_of_every_size sharding",
    "_arrays/_xla": "batching compiled accuracy::test_norms_of_every_size norms",
    "_clip/_elements": "bounds strict functional sparse nonfinite derivatives_edges"
    " jax::test_debug_nans_finds_nothing",
    "_clip/_clip": "functional strict bounds masks sparse nonfinite bad_input scopes nonfinite_cells"
    " mapped_refused mapped::test_untyped_must_be_declared methods::test_aggc_follows_its_equations"
    " accuracy::test_strict_is_never_above"
    " accuracy::test_strict_is_never_above_in_slices",
    "_clip/_layout": "masks scopes sparse",
    "_clip/_heads": "clip_logits clip_logits_last clip_logits_on_meshes",
    "_clip/_head_places": "clip_logits heads",
    "_clip/_head_names": "clip_logits",
    "scopes/_heads": "heads clip_logits_last"
    " registry::test_nothing_public_can_be_changed_by_accident",
    "scopes/_find_heads": "heads",
    "functional/_attention": f"{API} clip_logits",
    "functional/_attention_logit": f"{API} max_logit clip_logits_on_meshes",
    "transforms/_attention": f"{API} clip_logits_last",
    "transforms/_clip_by": "clip_by thresholds record masks bad_answers scopes",
    "transforms/_engine": "clip_by thresholds record metrics masks bad_answers scopes",
    "_arrays/_sparse": "sparse scopes nonfinite",
    "_clip/_nonfinite": "nonfinite sparse",
    "_arrays/_axis_names": "mapped mapped_refused sharding",
    "_arrays/_placement": "sharding mapped cotangent_meshes",
    "_arrays/_leaves": "leaf_kinds sparse masks leaves",
    "_arrays/_collectives": "sharding mapped collectives",
    "_arrays/_maxima": "nonfinite_large nonfinite_cells norms",
    "transforms/_state": "record metrics summary thresholds bad_answers",
    "transforms/_record": "record metrics summary thresholds",
    "transforms/_leaf_record": "leaf_record",
    "transforms/_outline": "outline",
    "_arrays/_by_path": "outline record batching",
    "_arrays/_closures": "relative_cotangents singular_value_derivatives",
    "_arrays/_examples": "clip_cotangent probe cotangent_meshes",
    "_arrays/_batching": "batching mapped compiled",
    "thresholds/_memory": "thresholds window bad_answers sharding",
    "monitor/_metrics": "metrics summary skip",
    "monitor/_summary": "summary bad_input::test_the_right_calls_are_right",
    "monitor/_suggest": "suggest bad_input::test_the_right_calls_are_right",
    "_arrays/_prefix": "prefix masks bounds functional bad_answers scopes",
    "_arrays/_validate": "bad_input",
    "plot/_history": "plot bad_input::test_what_cannot_be_used_is_refused_in_words",
    "plot/_style": "plot",
    "plot/_rate": "plot",
    "plot/_norms": "plot",
    "plot/_distribution": "plot",
    "plot/_heatmap": "plot",
    "plot/_runs": "plot",
    "scopes/_scope": "scopes bad_answers",
    "scopes/_axes": "units scopes relative",
    "scopes/_groups": "scopes bad_answers masks",
    "responses/_band": f"{API} responses methods::test_aggc_follows_its_equations bad_input",
    "responses/_elements": f"{API} responses",
    "thresholds/_rule": "thresholds",
    "thresholds/_fixed": "thresholds elements bad_answers bad_input",
    "thresholds/_resolve": "thresholds elements bad_answers bad_input",
    "thresholds/_bounds": "thresholds elements bad_input functional",
    "thresholds/_window": "window learned::test_nothing_bad_is_remembered bad_answers",
    "thresholds/_quantile": f"{API} window"
    " learned::test_learned_thresholds_follow_their_papers"
    " learned::test_nothing_bad_is_remembered"
    " learned::test_huge_and_tiny_norms_are_learned_from"
    " fuzz_histories::test_any_history_is_learned_as_the_paper_has_it[autoclip] bad_input",
    "thresholds/_mean_plus_std": f"{API} window"
    " learned::test_learned_thresholds_follow_their_papers"
    " learned::test_nothing_bad_is_remembered"
    " learned::test_huge_and_tiny_norms_are_learned_from"
    " fuzz_histories::test_any_history_is_learned_as_the_paper_has_it[levanter] bad_input",
    "thresholds/_ema": f"{API} ema running learned::test_adagc_follows_its_paper"
    " methods::test_olmo_ratio_follows_its_equations"
    " methods::test_axlearn_skip_follows_its_equations"
    " learned::test_nothing_bad_is_remembered"
    " fuzz_histories::test_any_history_is_learned_as_the_paper_has_it[adagc] fuzz_histories::test_any_history_is_learned_as_the_paper_has_it[ema]"
    " bad_input mapped::test_untyped_and_in_common",
    "thresholds/_zscore": f"{API} zscore"
    " learned::test_learned_thresholds_follow_their_papers"
    " learned::test_nothing_bad_is_remembered"
    " fuzz_histories::test_any_history_is_learned_as_the_paper_has_it[zclip] fuzz_histories::test_any_history_is_learned_as_the_paper_has_it[percentile]"
    " bad_input",
    "thresholds/_mean_over_rms": f"{API} running"
    " methods::test_stable_spam_is_both_and_then_adam_begun_anew"
    " learned::test_nothing_bad_is_remembered"
    " fuzz_histories::test_any_history_is_learned_as_the_paper_has_it[stable_spam-leaves] bad_input",
    "thresholds/_elements": f"{API} elements running"
    " methods::test_spam_follows_its_equations"
    " methods::test_stable_spam_of_elements_follows_its_equations"
    " methods::test_acclip_follows_its_equations"
    " learned::test_nothing_bad_is_remembered"
    " fuzz_histories::test_any_history_is_learned_as_the_paper_has_it[spam] fuzz_histories::test_any_history_is_learned_as_the_paper_has_it[acclip]"
    " bad_input",
    "thresholds/_previous_norm": f"{API} previous_norm bad_input",
    "thresholds/_relative": f"{API} relative"
    " methods::test_clippy_follows_its_equations bad_input",
    "thresholds/_before": "wrappers relative"
    " methods::test_stable_adamw_follows_its_equations",
    "thresholds/_running": "running ema elements zscore"
    " learned::test_learned_thresholds_follow_their_papers"
    " methods::test_olmo_ratio_follows_its_equations",
    "wrappers/_inner": "skip wrappers bad_input",
    "wrappers/_clip_after": "wrappers methods::test_stable_adamw_follows_its_equations",
    "wrappers/_error_feedback": "wrappers methods::test_uclip_follows_its_equations",
    "wrappers/_periodic_reset": f"{API} wrappers methods::test_spam_follows_its_equations bad_input",
    "wrappers/_skip": f"{API} skip bad_answers mapped::test_untyped_and_in_common"
    " mapped_refused::test_a_loss_that_differs_by_device bad_input",
    "recipes/_options": "recipes bad_input",
    "recipes/_plain": f"{API} recipe_edges methods::test_auto_s_follows_its_equations methods::test_sclip_follows_its_equations"
    " methods::test_uclip_follows_its_equations recipes::test_it_says_what_and_whence bad_input",
    "recipes/_adaptive": f"{API} learned::test_learned_thresholds_follow_their_papers"
    " relative learned::test_adagc_follows_its_paper"
    " methods::test_olmo_ratio_follows_its_equations units recipes bad_input",
    "recipes/_by_part": f"{API} recipe_edges learned::test_adagc_follows_its_paper"
    " methods::test_olmo_ratio_follows_its_equations methods::test_aggc_follows_its_equations"
    " recipes::test_modules_of_aggc_have_no_numbers"
    " fuzz_histories::test_any_history_is_learned_as_the_paper_has_it[adagc] fuzz_histories::test_any_history_is_learned_as_the_paper_has_it[aggc]"
    " bad_input",
    "recipes/_optimizers": f"{API} recipe_edges methods::test_spam_follows_its_equations"
    " methods::test_stable_spam_of_elements_follows_its_equations methods::test_stable_spam_of_leaves_follows_its_equations"
    " methods::test_stable_spam_is_both_and_then_adam_begun_anew methods::test_acclip_follows_its_equations bad_input",
    "recipes/_spectra": f"{API} spectra methods::test_spectra_follows_its_equations recipes bad_input",
    "recipes/_steps": f"{API} recipe_edges methods::test_stable_adamw_follows_its_equations"
    " methods::test_clippy_follows_its_equations"
    " recipes::test_no_decay_needs_no_parameters"
    " recipes::test_whole_numbers_pass_clippy bad_input",
    "recipes/_skips": f"{API} recipe_edges methods::test_olmo_skip_follows_its_equations methods::test_axlearn_skip_follows_its_equations"
    " methods::test_megatron_skip_follows_its_equations recipes bad_input",
}

# One or two changes of each kind: eleven for every plus sign tell no more.
BINARY = "Add_Sub|Sub_Add|Mul_Div|Div_Mul|Pow_Mul|BitAnd_BitOr|BitOr_BitAnd"
COMPARISON = (
    "Lt_LtE|Lt_Gt|LtE_Lt|LtE_Gt|Gt_GtE|Gt_Lt|GtE_Gt|GtE_Lt"
    "|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is"
)
UNARY = "Delete_|USub_UAdd"
SKIPPED = [
    f"core/ReplaceBinaryOperator_(?!({BINARY})$)",
    f"core/ReplaceComparisonOperator_(?!({COMPARISON})$)",
    f"core/ReplaceUnaryOperator_(?!({UNARY}))",
    "core/ExceptionReplacer",
]

# A part of the changed line, and why the mutant does the same as the original.
EQUIVALENT = {
    r"\+_LEAST = 2\.0\*\*- ": "that it is small is enough",
    r"\+.*(query|key)\[ -1\]\.number": "all leaves of a layer are split over the same axes",
    r"\+.*strict=False\)": "zip's strict guards against our own slips only",
    r"\+ +return clip.measure.*measured\[ ?-1\]": "there is one block",
    r"\+_CONCATENATED = 3|\+_MERGED, _CONCATENATED = 33": "a size that only speed depends on",
    r"\+ +if len\(batch\) >= 1": "one alone is merged with none",
    r"\+ +batches = _batches\(.*t\.power": "the batches are the same",
    r"\+ +return known\[ ?-1\]": "there is one",
    r"\+SMALL = \d\*\*\d\d|\+PLAIN = \d": "a size that speed, memory and the last bits depend on",
    r"\+ +count = jax\.tree\.leaves\(examples\)\[ ?-1\]": "all have the same batch axis",
    r"\+ +squares = \(known \*": "fractions are those of any multiple",
    r"\+ +early = .* if self\.warmup (>= 0|> ?-1) else": "all steps are past a warm-up of none",
    r"\+.*select\(number == 0, jnp": "x / x is 1 on a CPU",
    r"\+.*jnp\.minimum\(taken, 2\)": "no rounding on a CPU takes it above 1",
    r"\+.*arange\(-1, self\.window\)\.clip\( 1\)": "of one norm it is that norm",
    r"\+ +last = jnp\.maximum\(count - 1, 1\)": "of one norm it is that norm",
    r"\+.*low \+ 1, jnp\.maximum\(count - 1, -1\)": "of no norm it is inf",
    r"\+.*placed_as\(x, ring\[ 1\]\)": "all places lie on the same devices",
    r"\+ +positive = select\(score >= z": "at z both branches say the same",
    r"\+ +largest = .*max / [13]": "one very large number is as good as another",
    r"\+ +if x\.dtype != like\.dtype and not": "the other order says the same, later",
    r"\+.*select\(added <= 0": "0 is 0 either way",
    r"\+.*\(bits - 0\) - 1, whole": "zero has two signs",
    r"-@functools\.partial\(jax\.jit": "not compiled it says the same",
    r"\+.*(unit|size|split\)|row|found|\bu)\[\.\.\., -?1\]": "the axis has one entry",
    r"\+.*_of\(block\)\.x\[\.\.\., -?1\]": "each column has the shape of the first",
    r"\+.*(tangents|block\.leaves)\[ -1\]": "there is one",
    r"\+_WINDOW = \d\.0|\+_ROOT = _scales\(1 / [79]\.1": "the errors promised leave room",
    r"\+.*\| \(left\.stage < _MOST\)": "more rounds find nothing to take out",
    r"\+ +positive = .*left\.limit > -1": "of a threshold of 0 only speed depends on it",
    r"\+ +noise = ([35] |.*(/ squares|\* 0\.5))": "rounding has no sharp edge",
    r"\+ +others = .*zero \+ 2": "what is not chosen is a row of zeros",
    r"\+ +for _ in range\( ?3\)": "once more helps beyond what is promised",
    r"\+.*2 \* values, 1\), -?1\)": "of a zero it is multiplied by a row of zeros",
    r"\+ +while least <= 1 - 1e-7": "it never hits it",
    r"\+ +if shape\[axis\[0\]\] >= shape": "a square has equal sides",
    r"\+.*initial= ?-1\)": "no modulus is below 0, and nothing is measured of nothing",
    r"\+ +if x\.shape\[- ?1\] == 1": "the eigenvalue of a number is that number",
    r"\+.*other\.split\(\"/\"\), strict=True": "no leaf lies below another",
    r"\+.*span\.max\(initial=(1|-1)\)": "one key more is masked, and of no query nothing is",
    r"\+.*max\(len\(starts\), 2\)": "a span of no query finds nothing",
    r"\+.*left\.values, 2\)\[": "what is not taken is a row of zeros",
    r"\+ +values = jnp\.where\(live, slope.* 1\), -?1\)": "at zero each response is flat",
    r"\+ +mean = .*\*\* 3, \(-2": "any size that rounding does not reach will do",
    r"\+ +if len\(leaf\.shape\) < 1": "a vector is as wide as it is long",
    r"\+ +inside = norm < threshold": "at the threshold both branches say the same",
    r"\+ +num_(consts|carry): int = -1": "a step that is no loop has none",
    r"\+ +clip_cotangent\(\(\), [02]\.0 if": "of no array nothing is clipped",
    r"\+.*largest / \(is_known / is_known": "what it is divided by is 1 or NaN",
    r"\+ +return Dense\(groups / own": "how many groups there are is read off the arrays",
}


class Mutant(NamedTuple):
    module: str
    line: int
    operator: str
    outcome: str
    diff: str

    @property
    def reason(self) -> str | None:
        reasons = EQUIVALENT.items()
        found = (why for part, why in reasons if re.search(part, self.diff))
        return next(found, None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", help="as in TESTS; all if none")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--every", type=int, default=1, help="take each n-th mutant")
    options = parser.parse_args()
    modules = options.modules or list(TESTS)
    copies: queue.Queue[pathlib.Path] = queue.Queue()
    with tempfile.TemporaryDirectory() as folder:
        for i in range(options.workers):
            copies.put(_copy(pathlib.Path(folder) / str(i)))

        def run(module: str) -> list[Mutant]:
            copy = copies.get()
            try:
                return _mutate(module, copy, options.every)
            finally:
                copies.put(copy)

        with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
            mutants = [m for found in pool.map(run, modules) for m in found]
    return _report(mutants)


def _copy(target: pathlib.Path) -> pathlib.Path:
    kept_back = (".git", ".venv*", ".nox", ".hypothesis", ".coverage", "__pycache__")
    ignored = shutil.ignore_patterns(*kept_back)
    shutil.copytree(ROOT, target, ignore=ignored)
    return target


def _mutate(module: str, copy: pathlib.Path, every: int) -> list[Mutant]:
    files = " ".join(_file(name) for name in TESTS[module].split())
    # -I and the like would find the installed package: here the copy must be first.
    test = f"{sys.executable} -m pytest -x -q -p no:cacheprovider {files}"
    # Tests that fail without a fault would seem to notice every one.
    begun = time.monotonic()
    subprocess.run(shlex.split(test), cwd=copy, check=True)
    # Cosmic-ray counts what is cut off as noticed: only an endless loop may be.
    patience = 60 + 5 * (time.monotonic() - begun)
    name = module.replace("/", "-")
    config = copy / f"{name}.toml"
    config.write_text(
        "[cosmic-ray]\n"
        f'module-path = "optclip/{module}.py"\n'
        f"timeout = {patience:.1f}\n"
        "excluded-modules = []\n"
        f'test-command = "{test}"\n'
        "[cosmic-ray.distributor]\n"
        'name = "local"\n'
        "[cosmic-ray.filters.operators-filter]\n"
        f"exclude-operators = {json.dumps(SKIPPED)}\n"
    )
    session = f"{name}.sqlite"
    tool = [sys.executable, "-m", "cosmic_ray.cli"]
    skip = [sys.executable, "-m", "cosmic_ray.tools.filters.operators_filter"]
    subprocess.run([*tool, "init", config.name, session], cwd=copy, check=True)
    subprocess.run([*skip, session, config.name], cwd=copy, check=True)
    _skip_but_every(every, copy / session)
    subprocess.run([*tool, "exec", config.name, session], cwd=copy, check=True)
    dump = subprocess.check_output([*tool, "dump", session], cwd=copy, text=True)
    found = [_parsed(module, line) for line in dump.splitlines()]
    mutants = [mutant for mutant in found if mutant]
    killed = sum(mutant.outcome != "survived" for mutant in mutants)
    late = sum(mutant.outcome == "timeout" for mutant in mutants)
    print(
        f"{module}: {killed} of {len(mutants)} noticed"
        f" ({late} by running over {patience:.0f} s)",
        flush=True,
    )
    return mutants


def _skip_but_every(every: int, session: pathlib.Path) -> None:
    """Mark as skipped all but each `every`-th mutant."""
    # Here, because only those who run the proofs have it installed.
    from cosmic_ray.work_db import WorkDB, use_db
    from cosmic_ray.work_item import WorkerOutcome, WorkResult

    with use_db(session, WorkDB.Mode.open) as db:
        for i, item in enumerate(sorted(db.pending_work_items, key=_place)):
            if i % every:
                skipped = WorkResult(worker_outcome=WorkerOutcome.SKIPPED)
                db.set_result(item.job_id, skipped)


def _place(item: Any) -> Any:
    (mutation,) = item.mutations
    return mutation.start_pos, mutation.operator_name, mutation.occurrence


def _file(name: str) -> str:
    file, _, test = name.partition("::")
    (path,) = ROOT.glob(f"tests/**/test_{file}.py")
    return str(path.relative_to(ROOT)) + (f"::{test}" if test else "")


def _parsed(module: str, line: str) -> Mutant | None:
    item, result = json.loads(line)
    if result is None or result["worker_outcome"] == "skipped":
        return None
    (mutation,) = item["mutations"]
    outcome = str(result["test_outcome"]).lower()
    if result["output"] == "timeout":
        outcome = "timeout"
    diff = result["diff"] or ""
    if _is_annotation(diff):
        return None
    start = mutation["start_pos"][0]
    return Mutant(module, start, mutation["operator_name"], outcome, diff)


def _is_annotation(diff: str) -> bool:
    """`X | None` in a signature or `*,` there: no fault in what is computed."""
    gone = [line[1:] for line in diff.splitlines() if re.match(r"-(?!--)", line)]
    return any(
        re.search(r"\|\s*(None|Callable)|(^|[(,])\s*\*,|: \w+ \| \w+", x) for x in gone
    )


def _report(mutants: list[Mutant]) -> int:
    survived = [m for m in mutants if m.outcome == "survived"]
    same = [m for m in survived if m.reason]
    counted = len(mutants) - len(same)
    for mutant in survived:
        changed = [x for x in mutant.diff.splitlines() if re.match(r"[-+](?![-+])", x)]
        print(f"\n{mutant.module}:{mutant.line} {mutant.operator}")
        print("\n".join(changed), f"\n  = {mutant.reason}" if mutant.reason else "")
    score = 1 - (len(survived) - len(same)) / max(counted, 1)
    print(
        f"\n{len(mutants)} mutants, {len(same)} of them equivalent;"
        f" {score:.1%} of the others noticed (goal {GOAL:.0%})"
    )
    return int(score < GOAL)


if __name__ == "__main__":
    sys.exit(main())
