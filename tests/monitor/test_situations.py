"""A healthy run has no finding, and a broken one has each of its findings."""

import math
import re

import numpy as np
import optax
import pytest

import optclip
from optclip import thresholds
from tests.support.situations import (
    LEAVES,
    along,
    at,
    log,
    noise,
    readings,
    run,
    trained,
)

GLOBAL = optclip.clip_by_global_norm(1.0, record="leaves")
WATCH = optclip.clip_by_global_norm(math.inf, record="leaves")
ADAGC = optclip.recipes.adagc(max_norm=None, record="leaves")
ADAM = optax.chain(optclip.clip_by_global_norm(1.0), optax.adam(1e-3))
PRODUCTION = optclip.skip(
    ADAM, max_norm=thresholds.scaled(thresholds.quantile(0.5), 10.0)
)
LEAVES_TOO = optclip.skip(
    ADAM, max_norm=thresholds.scaled(thresholds.quantile(0.5), 10.0), record="leaves"
)
FIXED = optclip.skip(ADAM, max_norm=2.0)
BY_LOSS = optclip.skip(ADAM, max_loss=thresholds.mean_plus_std(6.0))
LEARNING = optclip.clip_by_global_norm(thresholds.mean_plus_std(3.0, window=20))
WARM_UP = thresholds.scaled(1.0, optax.linear_schedule(10.0, 1.0, 100))
MUON = optax.chain(
    optclip.clip_by_global_norm(1.0),
    optax.trace(0.95),
    optclip.clip_by_singular_value(1.0, response="normalize", method="newton_schulz"),
)
SIDES = {name: "critic" if "attn" in name else "generator" for name in LEAVES}
SIDES_ALONE = optclip.clip_by_group_norm({"critic": 1.0, "generator": 1.0}, SIDES)

ROW, RANDOM = np.arange(300), np.random.default_rng(0).random(300)
STEADY, LOSS = 0.5 * noise(300), 2.8 * noise(300, 0.03, 1)
# A log of torchtitan.
NORMS = noise(250, 0.05) * along(
    ROW[1:251], {1: 14.11, 10: 4.105, 100: 1.05, 250: 0.576}
)
LOSSES = along(ROW[1:251], {1: 12.78, 10: 2.111, 100: 0.2125, 250: 0.0675})
# A classifier that learns its data by heart, hate_speech_detection.
BY_HEART = log(
    noise(150, 0.2)
    * along(ROW[1:151], {1: 6.17, 2: 1.717, 3: 0.333, 5: 0.041, 12: 0.01, 150: 5e-4}),
    along(ROW[1:151], {1: 0.8496, 2: 0.2712, 3: 0.045, 4: 0.0098, 12: 8e-4, 150: 1e-5}),
)
CYCLE, IDLE = ROW % 6 == 5, np.where(RANDOM < 0.05, STEADY, 0)
KERNEL, KEY_BIAS = noise(300, 0.3), 1e-9 * np.abs(np.log(RANDOM))
# slm_training: the log continues after each restart.
RESTARTED = np.r_[20, 20, 40, 20, np.arange(40, 4000, 20), np.arange(3900, 5000, 20)]

HEALTHY = {
    "a model of ours": lambda: trained(),
    "a model of ours, at a high rate": lambda: trained(rate=0.1),
    "decaying start": lambda: log(NORMS, LOSSES, ROW[1:251]),
    "decaying start, clipped": lambda: run(GLOBAL, NORMS, LOSSES),
    # A second log of torchtitan, and a row for each step between its rows.
    "decaying start, every 20 steps": lambda: log([4.7, 11.4, 6.2, 1.9, 0.46], steps=range(20, 101, 20)),
    "decaying start, row for row": lambda: log(along(ROW + 1, {20: 4.7, 40: 11.4, 60: 6.2, 80: 1.9, 100: 0.46, 300: 0.3})),
    # Prompt4Driving issue 7, where the first norm is 110 times the median.
    "first norm of 110": lambda: log(at(noise(100), {0: 110.0, 1: 40.0, 2: 12.0})),
    # law-llm.
    "six rows": lambda: log([197.5, 422.0, 3.32, 2.18, 2.7, 2.68], [284.9, 161.2, 9.9, 5.39, 5.18, 5.02]),
    # DAOcc issue 25: NaN at first, 7217 in step 9, inf in 10, 448 in 54, then about 1.
    "start in float16": lambda: log(
        at(noise(300) * along(ROW + 1, {9: 7217, 54: 448, 300: 1.0}), {(0, 8): np.nan, 9: np.inf}), along(ROW + 1, {1: 795, 54: 46, 300: 30})),
    # soup-dpo-takehome: NaN in steps 1, 2 and 18 of 75.
    "loss scale falls in step 18": lambda: log(
        at(noise(75) * along(ROW[1:76], {1: 15, 6: 20, 17: 10.8, 25: 8.3, 75: 4}), {(0, 2): np.nan, 17: np.nan}), steps=ROW[1:76]),
    # TableMASTER-mmocr issue 32, where "it is normal if the loss can converge".
    "first of two rows is NaN": lambda: log([np.nan, 3.9772], [1.9091, 0.9186], [100, 200]),
    # DeepSpeed issue 931 and apex issue 864: the scale is doubled in every 2000 steps.
    "loss scale overflows again": lambda: log(at(noise(4200), {(0, 6): np.nan, 2006: np.inf, 4006: np.inf})),
    # The Trainer writes four digits.
    "learned by heart": lambda: {k: np.round(x, 4) for k, x in BY_HEART.items()},
    "learned by heart, start lost": lambda: {k: x[2:] for k, x in BY_HEART.items()},
    # Losses of AnalisisDeTacticas, a classifier whose few hard examples recur.
    "hard examples recur": lambda: log(0.006 * noise(112), at(
        3e-4 * noise(112), {3: 0.0286, 12: 0.0875, 30: 0.0026, 33: 0.1025, 39: 0.1059, 43: 0.1049, 48: 0.0036, 56: 0.0763,
                            64: 0.0986, 71: 0.0689, 73: 0.1799, 83: 0.0014, 85: 0.063}), range(4310, 5430, 10)),
    # SmolVLM_EndoscopyQA.
    "third norm is the largest": lambda: log(
        noise(90) * along(ROW[1:91], {1: 4.25, 2: 3.53, 3: 15.0, 4: 0.683, 5: 0.195, 6: 0.061, 16: 0.033, 45: 0.011, 90: 0.016}),
        along(ROW[1:91], {1: 19.2, 2: 14.4, 3: 5.46, 4: 0.406, 6: 0.0396, 11: 0.0084, 90: 0.0022})),
    "warm-up of the rate": lambda: log(
        noise(300) * along(ROW + 1, {1: 0.05, 120: 3, 300: 3}), along(ROW + 1, {1: 11, 120: 3.5, 300: 3}) * noise(300, 0.02)),
    "warm-up of the threshold": lambda: run(optclip.clip_by_global_norm(WARM_UP), 2 * STEADY),
    "unlike leaves": lambda: run(optclip.clip_by_norm(1.0), STEADY, **{k: 20.0**i * noise(300, 0.6, i) for i, k in enumerate(LEAVES)}),
    "key bias, leaves": lambda: run(ADAGC, KERNEL, attn_key=KEY_BIAS),
    "key bias": lambda: run(optclip.recipes.adagc(max_norm=None), KERNEL, attn_key=KEY_BIAS),
    # Chaos-Economy.
    "GRPO losses around 0": lambda: log(0.3 * noise(50, 0.15), at(
        5e-5 * noise(50, 0.3), {(0, 9): [-0.108, 0.0105, 0.0258, -0.138, -0.162, 8e-6, -0.07, 0.016, -0.024], 40: -0.0323})),
    # MemGen pull request 33 and trl issue 3452: all rewards of a step may be equal.
    "equal rewards": lambda: log(np.where(RANDOM < 0.4, 0.1 * noise(300, 0.3), 0), at(np.zeros(300), {0: -0.2874})),
    "GAN, one log": lambda: log(np.where(ROW % 2, 30, 1) * noise(300), np.where(ROW % 2, 0.7, 3.0) * noise(300)),
    "critic five times, one log": lambda: log(np.where(CYCLE, 30, 1) * noise(300), np.where(CYCLE, 9, -2) + 0.1 * STEADY),
    "critic five times, two groups": lambda: run(
        SIDES_ALONE, np.where(CYCLE, 0, STEADY), **{k: np.where(CYCLE, 20 * STEADY, 0)
            for k, side in SIDES.items() if side == "generator"}),
    # The norm of a frozen model with a new head was 10, and 141 with its body.
    "nearly all of the norm in one leaf": lambda: run(GLOBAL, 0.01 * STEADY, head=STEADY),
    # prime-rl issue 2362: 120 times between the two factors, of which one starts at 0.
    "factors of LoRA": lambda: run(GLOBAL, STEADY, **{k: at(STEADY / 300, {0: 0}) for k in ("attn_key", "mlp_in")}),
    "unfrozen body": lambda: run(WATCH, 10 * noise(300), **dict.fromkeys(["mlp_in", "mlp_out"], np.where(ROW < 60, 0, 50 * noise(300)))),
    "frozen leaf": lambda: run(WATCH, STEADY, mlp_in=0 * STEADY),
    "losses rise and fall again": lambda: log(noise(1000), 1e-3 * noise(1000) * np.exp(3 * np.maximum(0, np.sin(np.arange(1000) / 50)))),
    "loss in every second row": lambda: log(STEADY, np.where(ROW % 2, np.nan, LOSS)),
    "idle experts": lambda: run(WATCH, STEADY, mlp_in=IDLE, mlp_out=np.roll(IDLE, 7)),
    "rare expert with a small gradient": lambda: run(WATCH, STEADY, mlp_in=np.maximum(IDLE, 1e-3 * STEADY)),
    "restart": lambda: log(along(RESTARTED, {20: 5, 500: 1, 5000: 0.5}) * noise(257),
        along(RESTARTED, {20: 8.56, 100: 6.43, 500: 3.5, 1000: 2.63, 5000: 2.3}) * noise(257, 0.02), RESTARTED),
    # The attempt that was given up was broken, the run that was continued is not.
    "restart before NaN": lambda: log(at(noise(300), {(180, 200): np.nan, 179: 60}), LOSS, [*range(200), *range(150, 250)]),
    "restart that is behind NaN": lambda: log(at(noise(220), {(180, 200): np.nan, 179: 60}), LOSS[:220], [*range(200), *range(150, 170)]),
    "heavy tail": lambda: log(1 + np.random.default_rng(0).pareto(2.5, 1000)),
    "wide spread": lambda: log(noise(1000, 1.0)),
    "bfloat16": lambda: log(np.round(0.25 * noise(300, 0.02), 2), np.round(LOSS, 1)),
    "learned threshold after a change of level": lambda: run(LEARNING, np.where(ROW < 150, 1, 8) * STEADY),
    "threshold is never reached": lambda: run(optclip.clip_by_global_norm(99.0), STEADY),
    # Norms under Muon, Megatron-LM pull request 5395; each update has the length 1.
    "orthogonalized updates": lambda: run(MUON, 4e7 * noise(150)),
    "one row": lambda: log([3.0], [2.0]),
    "start lost by the ring": lambda: run(WATCH, NORMS[:60], LOSSES[:60], rows=40),
    "two tasks in turn": lambda: log(STEADY, np.where(ROW % 2, 0.5, 8.0) * noise(300, 0.05)),
    "two tasks at random": lambda: log(STEADY, np.where(RANDOM < 0.25, 8.0, 0.5) * noise(300, 0.05)),
    # distrax issue 202 and pytorch-normalizing-flows issue 7.
    "losses of a flow": lambda: log(STEADY, -along(ROW + 1, {1: 6, 300: 3098}) * noise(300, 0.02)),
    "loss falls below 0": lambda: log(STEADY, 8e5 * 0.9**ROW - 3e4 + 500 * noise(300)),
    "longer sequences": lambda: log(np.where(ROW < 150, 1, 3) * STEADY, np.where(ROW < 150, 1, 1.15) * LOSS),
    "norm grows": lambda: log(STEADY * 30 ** (ROW / 300), LOSS),
    "masked batches": lambda: log(at(STEADY, {(100, 300, 50): 0}), at(LOSS, {(100, 300, 50): 0})),
    "equal rows": lambda: log(np.ones(100), np.full(100, np.log(2))),
    "skip that skips nothing": lambda: run(PRODUCTION, STEADY, LOSS),
    "skip by loss that skips nothing": lambda: run(BY_LOSS, STEADY, LOSS),
}  # fmt: skip

NAN_FROM_80 = at(STEADY[:120], {(80, 120): np.nan})
BURST_NORMS = at(STEADY, {(195, 199): [1.15, 1.54, 1.12, 0.64]})
BURST = at(LOSS, {(195, 199): [5.79, 6.64, 6.06, 5.48]})
BURSTS = (100, 117), (200, 217)
LOSS_BURST = r"loss 6\.6.* step 196.*2\.[2-5] times.*195 to 198"
ONE_SPIKE = at(STEADY, {150: 30.0})
TORCHTITAN = at(NORMS, {200: 9.0})
UNSLOTH = [
    14.98,
    9.78,
    7.64,
    92.1,
    29.0,
    5.21,
    7.83,
    7.79,
    11140.0,
    7.2,
    8.1,
    6.9,
    7.5,
    8.4,
    7.0,
]
UNSLOTH_LOSS = [
    1.46,
    1.28,
    1.6,
    1.14,
    1.54,
    1.61,
    1.36,
    1.36,
    1.51,
    1.4,
    1.3,
    1.5,
    1.4,
    1.35,
    1.3,
]
ELEVEN_THOUSAND = r"(11140|1\.114e\+04)"

# The run, then a pattern for each finding, gravest first. Those of a state may lack some.
BROKEN = {
    "NaN from the start": (lambda: run(GLOBAL, np.full(120, np.nan)), "not finite in 120 of 120 steps, since step 0.*checkpoint"),
    "NaN from the start, log": (lambda: log(np.full(120, np.nan), np.zeros(120)), "not finite in 120 of 120 steps, since step 0"),
    "NaN from the start, ring": (lambda: run(WATCH, np.full(120, np.nan), rows=40), "since step 0.*checkpoint"),
    "NaN since 80": (lambda: run(GLOBAL, NAN_FROM_80), "since step 80.*checkpoint.*skip"),
    "NaN since 80, log": (lambda: log(NAN_FROM_80), "not finite.* since step 80"),
    "NaN before the rows of the ring": (lambda: run(WATCH, at(NAN_FROM_80, {(60, 80): np.nan}), rows=40), "since step 80, or earlier"),
    "inf since 80": (lambda: run(GLOBAL, at(NAN_FROM_80, {(80, 120): np.inf})), "since step 80"),
    "NaN since 80, skipped": (lambda: run(PRODUCTION, NAN_FROM_80), "^(?!.*(raise|learn_skipped)).*not finite.* since step 80"),
    "NaN in one leaf first": (lambda: run(WATCH, NAN_FROM_80, mlp_out=at(STEADY[:120], {(78, 120): np.nan})), "since step 78.*mlp_out"),
    "NaN in one step": (lambda: run(optclip.clip_by_global_norm(1.0, nonfinite="zero"), at(STEADY, {170: np.nan})), "not finite in .*170"),
    "NaN in one step, skipped": (lambda: run(PRODUCTION, at(STEADY, {170: np.nan})), "not finite in .*170"),
    "NaN in the last row": (lambda: log(at(STEADY, {299: np.nan}), LOSS), "not finite.* step 299"),
    "NaN in one step in four": (lambda: log(at(STEADY, {(50, 300, 4): np.nan})), "not finite in 63 of 300"),
    # Pink issue 6 and ModernBERT issue 233: the Trainer logs a loss of 0 for NaN.
    "NaN in the Trainer": (lambda: log(at(STEADY, {(200, 300): np.nan}), at(0.2 * noise(300, 0.1), {(201, 300): 0.0})), "not finite in 100 of 300 steps, since step 200"),
    # xtuner issue 187 and YOLO-World issue 614.
    "NaN in six rows": (lambda: log([3.06, 2.76, 2.76, 2.51, np.nan, np.nan], [2.75, 2.62, 2.67, 2.77, 2.51, 2.46], range(200, 260, 10)), "not finite.* since step 240"),
    "NaN in five rows": (lambda: log([205225.0, 638.5, 636.0, np.nan, np.nan], [2050.0, 626.2, 738.4, np.nan, np.nan]), "not finite.* since step 3"),
    "unsloth 5207": (lambda: log(UNSLOTH, UNSLOTH_LOSS, range(1, 16)), ELEVEN_THOUSAND + r".*step 9\b"),
    "unsloth 5207, skipped": (lambda: run(PRODUCTION, UNSLOTH), r"(?=.*step 8\b).*" + ELEVEN_THOUSAND),
    "loss burst": (lambda: run(GLOBAL, BURST_NORMS, BURST), LOSS_BURST),
    "loss burst, log": (lambda: log(BURST_NORMS, BURST), LOSS_BURST),
    "loss burst, slow recovery": (lambda: log(STEADY, at(BURST, {(199, 209): np.linspace(4.5, 3.0, 10)})), r"loss 6\.6.* step 196"),
    # A bit of a gradient flips in step 200, and the losses rise from the next one on.
    "norm before the loss": (lambda: log(at(STEADY, {200: 4e36}), at(LOSS, {(201, 206): [4.8, 9.7, 15.8, 9.0, 5.0]})), r"loss 15\.8.* step 203", "step 200"),
    "loss burst, skipped": (lambda: run(BY_LOSS, BURST_NORMS, BURST), "(?=.*skip)" + LOSS_BURST),
    "loss burst in the last row": (lambda: log(STEADY, at(LOSS, {299: 6.6})), r"loss 6\.6.* step 299"),
    # As noisy, and as long, as the log of kevin-token-compressor.
    "loss burst in 100 noisy rows": (lambda: log(STEADY[:100], at(2.12 * noise(100, 0.055), {(50, 53): [5.35, 5.68, 5.33]})), r"loss 5\.68 in step 51.*50 to 52"),
    # bashkir-language and a log of 50 rows.
    "loss burst in 50 noisy rows": (lambda: log(STEADY[:50], at(0.6 * noise(50, 0.08), {(31, 33): [1.49, 1.62]})), r"loss 1\.62 in step 32.*31 to 32"),
    "loss burst in 300 noisy rows": (lambda: log(STEADY, at(0.9 * noise(300, 0.13), {163: 2.47})), r"loss 2\.47 in step 163"),
    "loss burst in small batches": (lambda: log(STEADY, at(2 * noise(300, 0.3, 1), {150: 100.0})), r"loss 100 in step 150"),
    "burst of a constant loss": (lambda: log(STEADY, at(np.full(300, 0.6931), {150: 5.0})), r"loss 5 in step 150"),
    "loss in one row in ten": (lambda: log(STEADY, np.where(ROW % 10, np.nan, at(LOSS, {150: 9.0}))), r"loss 9.* step 150"),
    "loss of a flow": (lambda: log(STEADY, at(-along(ROW + 1, {1: 6, 100: 3000, 300: 3098}), {200: -900})), "loss -900.* step 200(?!.*times)"),
    "NaN in the loss only": (lambda: log(STEADY, at(LOSS, {(250, 300): np.nan})), "loss: not finite in 50 of 300 steps, since step 250"),
    "NaN in all losses": (lambda: log(STEADY, np.full(300, np.nan)), "loss: not finite in 300 of 300 steps"),
    "NaN in one loss": (lambda: log(STEADY, at(LOSS, {170: np.nan})), r"loss: not finite in 1 of 300 steps: 170\."),
    "NaN in every seventh loss": (lambda: log(STEADY, at(LOSS, {(50, 300, 7): np.nan})), "loss: not finite in 36 of 300"),
    "NaN in the loss, norms applied": (lambda: run(PRODUCTION, STEADY, at(LOSS, {(250, 300): np.nan})), "loss: not finite in 50 of 300 steps, since step 250"),
    # A growing learning rate.
    "loss climbs": (lambda: log(STEADY, LOSS * 1.04 ** np.maximum(0, ROW - 250)), r"loss rose from 2\.\d+ to 1\d.* since step 2[45]\d .*before step 2[45]\d\."),
    "norm climbs": (lambda: log(STEADY * 1.02 ** np.maximum(0, ROW - 100), LOSS), r"norm rose from 0\.[45].* since step 1[01]\d .*before step 1[01]\d\."),
    "leaf climbs": (lambda: run(WATCH, STEADY, mlp_out=2e-3 * STEADY * 1.035 ** np.maximum(0, ROW - 100)), r"norm of mlp_out rose from 0\.00.* since step (9|10|11)\d? "),
    "norms climb until they are skipped": (lambda: run(LEAVES_TOO, STEADY, head=0.2 * STEADY * 1.1 ** np.maximum(0, ROW - 100)),
        r"skip: the last \d+ steps were skipped.*rose from 0\.[45].* since step 1\d\d .*most in head\. Restore.* before step 1\d\d\. .*wait"),
    "leaf dies": (lambda: run(WATCH, STEADY, mlp_out=at(STEADY, {(150, 300): 0})), "norm of mlp_out has been 0 since step 150"),
    # BigDL issue 1486.
    "infinite loss": (lambda: log(noise(60), at(1.27 * noise(60, 0.03), {44: np.inf})), r"loss.*not finite.*\b44\b"),
    # crystal-text-llm issue 6: the loss rises from 0.5 to 6 and stays, norms become 0.
    "loss diverges": (lambda: log(
        at(0.27 * noise(300), {(200, 210): [1.36, 1.28, 17.2, 7.1, 21.8, 23.0, 3.8, 14.4, 7.4, 9.0], (210, 300): 0}),
        at(along(ROW + 1, {1: 1.36, 150: 0.48, 300: 0.48}) * noise(300, 0.03), {(200, 210): np.linspace(0.58, 5.5, 10), (210, 300): 6.0 * noise(90, 0.02)})),
        r"loss rose from 0\.4.* to [56].*step 20"),
    "loss on another level": (lambda: log(STEADY, np.where(ROW < 200, 2.3, 7.2) * noise(300, 0.03)), r"loss rose from 2\.[23].* to 7.* step 200"),
    "spike": (lambda: run(GLOBAL, ONE_SPIKE), r"\b30\b.* step 150"),
    "spike, log": (lambda: log(ONE_SPIKE, LOSS), r"\b30\b.* step 150"),
    "spike after a decaying start": (lambda: log(TORCHTITAN, LOSSES, ROW[1:251]), r"\b9\b.* step 201"),
    "spike after a decaying start, clipped": (lambda: run(WATCH, TORCHTITAN, LOSSES), r"\b9\b.* step 200"),
    "spike in the last row": (lambda: log(at(STEADY, {299: 30.0})), r"\b30\b.* step 299"),
    "spike in the last row, clipped": (lambda: run(GLOBAL, at(STEADY, {299: 30.0})), r"\b30\b.* step 299"),
    # mmdetection issue 3446: the norm of one row of an unchanged loss.
    "spike in nine rows": (lambda: log([0.11, 0.09, 0.1, 0.087, 253.27, 0.0649, 0.08, 0.07, 0.09], [0.8, 0.78, 0.77, 0.7612, 0.7796, 0.7372, 0.74, 0.73, 0.72], range(550, 1000, 50)), r"253.*step 750"),
    "spike in leaves of which one is recorded": (lambda: run(optclip.recipes.adagc(), at(STEADY, {150: 30.0})), r"\b12\.25 in step 150, .*each relative to its threshold"),
    "two spikes": (lambda: log(at(STEADY, {100: 30.0, 220: 25.0}), LOSS), r"(?=.*\b220\b).*\b30\b.* step 100"),
    "burst of six rows": (lambda: log(at(STEADY, {(195, 201): [20, 40, 35, 30, 32, 25]})), r"\b40\b.* step 196"),
    "explosion": (lambda: log(at(STEADY, {(288, 300): 0.5 * 3.0 ** ROW[:12]})), r"8\.857e\+04.* step 299"),
    "spike in one leaf": (lambda: run(WATCH, STEADY, mlp_out=at(0.02 * STEADY, {150: 0.6})), r"mlp_out.*\b0\.6\b.*step 150"),
    "spike beside a key bias": (lambda: run(ADAGC, at(KERNEL, {200: 60.0}), attn_key=KEY_BIAS), r"^(?!.*attn_key).*step 200"),
    "norms skipped": (lambda: run(PRODUCTION, at(STEADY, {(195, 199): 40.0})), r"195 to 198"),
    # minFM issue 4: norms of 2.2 above a limit of 2.
    "stuck": (lambda: run(FIXED, np.where(ROW < 150, 1.6, 2.2) * noise(300, 0.02)), r"last 150 steps were skipped.*above 2.*max_norm="),
    "stuck from the start": (lambda: run(FIXED, 9 * STEADY), r"skip: the last 300 steps were skipped.*max_norm="),
    "stuck at a high level": (lambda: run(FIXED, np.where(ROW < 150, 1.0, 50.0) * noise(300, 0.1)), r"last 150 steps were skipped.*above 2.*max_norm="),
    "threshold follows a spike": (lambda: run(LEARNING, ONE_SPIKE), r"\b30\b.* step 150", "threshold rose"),
    "threshold of skip follows a spike": (lambda: run(optclip.skip(ADAM, max_norm=thresholds.mean_plus_std(3.0, window=20)), ONE_SPIKE), r"\b30\b.* step 150", "skipped 2 of 300", "Use max_norm="),
    "rule has stopped": (lambda: run(LEARNING, at(STEADY, {(50, 300): 0})), "stopped learning|0 since step 50"),
    "clipped in each step": (lambda: run(optclip.clip_by_global_norm(0.05), noise(150)), r"clipped in 100% of 150 steps"),
    "threshold of 0": (lambda: run(optclip.clip_by_global_norm(0.0), STEADY), r"clipped in 100% of 300 steps, usually to 0 of"),
    "most of a norm in one leaf": (lambda: run(optclip.clip_by_global_norm(0.01, record="leaves"), 0.3 * STEADY, head=STEADY), "raise the threshold"),
    "skipped too often": (lambda: run(FIXED, np.where(RANDOM < 0.3, 3.0, 1.0)), r"skipped (2|3)\d% of 300"),
    # MaxText pull request 5285: one leaf has nearly all of a norm that is clipped.
    "one leaf has the norm": (lambda: run(GLOBAL, 0.2 * STEADY, mlp_out=40 * STEADY), r"mlp_out has .*99%"),
    "spike, loss and NaN": (lambda: log(at(STEADY, {60: 30.0, (250, 300): np.nan}), at(LOSS, {120: 9.0, (250, 300): np.nan})),
        "since step 250", r"loss 9.* step 120", r"\b30\b.* step 60"),
    "loss and spike": (lambda: run(WATCH, at(STEADY, {60: 30.0}), BURST), LOSS_BURST, r"\b30\b.* step 60"),
    # In bursts the norm of a leaf is eight times the usual one; another recovers later.
    "loss and spike in one leaf": (lambda: run(WATCH, STEADY, at(LOSS, dict.fromkeys(BURSTS, 6.6)), mlp_in=at(0.02 * STEADY, {(117, 120): 0.3}),
        mlp_out=at(0.02 * STEADY, {(100, 117, 3): 0.08, (200, 217, 3): 0.08, 250: 0.35})), r"loss 6\.6.*100 to 116, 200 to 216", r"mlp_out 0\.35 .*step 250"),
    "loss and NaN": (lambda: run(PRODUCTION, at(STEADY, {(250, 300): np.nan}), BURST), "not finite.* since step 250", LOSS_BURST),
    "spike that brings the loss along": (lambda: log(ONE_SPIKE, at(LOSS, {150: 9.0})), "loss 9.* step 150"),
    "stuck after a spike": (lambda: run(FIXED, at(noise(300, 0.02), {60: 90.0, (150, 300): 2.2})), r"last 150 steps were skipped", r"\b60\b"),
    "spike of a model of ours": (lambda: trained(weights={150: 1e3}), "loss .* step 150"),
    "bad shard of a model of ours": (lambda: trained(random=range(195, 199)), r"loss .*step 19[5-8].*195 to 198"),
    "rate raised in a model of ours": (lambda: trained(rate=np.where(ROW < 150, 0.01, 3.0)), r"loss rose from 0\.[67].* step 15"),
    "NaN in a model of ours": (lambda: trained(weights={150: np.nan}), "since step 150.*checkpoint"),
}  # fmt: skip


# A state has one row, and counts. It has no finding in the other runs.
IN_STATE = {
    "NaN from the start": "not finite in 120 of 120 steps, since step 0.*checkpoint",
    "NaN from the start, ring": "not finite in 120 of 120 steps, since step 0",
    "NaN since 80": "not finite in 40 of 120 steps.*checkpoint",
    "NaN before the rows of the ring": "not finite in 60 of 120 steps",
    "inf since 80": "not finite in 40 of 120 steps",
    "NaN since 80, skipped": "not finite in (40 of 120|the last 40) steps",
    "NaN in one leaf first": "not finite in 42 of 120 steps",
    "NaN in a model of ours": "not finite in 150 of 300 steps",
    "norms climb until they are skipped": r"last \d+ steps were skipped.*wait if the threshold is learned",
    "stuck": "last 150 steps were skipped",
    "stuck from the start": "last 300 steps were skipped",
    "threshold of 0": "in the last one to 0 of the norm",
    "most of a norm in one leaf": "raise the threshold",
    "stuck at a high level": "last 150 steps were skipped",
    "stuck after a spike": "last 150 steps were skipped",
    "loss and NaN": "not finite in (50 of 300|the last 50) steps",
    "clipped in each step": "clipped in 100% of 150 steps",
    "skipped too often": r"skipped (2|3)\d% of 300",
    "one leaf has the norm": "mlp_out has .*99%",
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_run_has_no_finding(tmp_path, name):
    found = readings(HEALTHY[name](), tmp_path)
    assert not any(found.values()), found


@pytest.mark.parametrize("name", BROKEN)
def test_broken_run_has_its_findings_gravest_first(tmp_path, name):
    make, *patterns = BROKEN[name]
    found = readings(make(), tmp_path)
    in_state = [IN_STATE[name]] if name in IN_STATE else []
    expected = dict.fromkeys(found, patterns) | {"state": in_state}
    for form, lines in found.items():
        assert len(lines) == len(expected[form]), found
        assert not re.search("Adam|finds", str(lines))
        assert all(map(re.search, expected[form], lines)), found


def test_log_with_norms_times_a_constant_has_the_same_findings(tmp_path):
    for make, *_ in BROKEN.values():
        if isinstance(run := make(), dict):
            runs = run, {**run, "grad_norm": 1024 * run["grad_norm"]}
            found = [readings(run, tmp_path)["lines"] for run in runs]
            # The words are compared, and the steps.
            one, other = (re.sub(r"(?<!step )\b\d[\d.e+]*", "", str(x)) for x in found)
            assert one == other


@pytest.mark.parametrize(
    "name", ["loss burst, log", "loss burst, slow recovery", "spike, log"]
)
def test_finding_stays_when_healthy_rows_follow(tmp_path, name):
    run, (_, pattern) = BROKEN[name][0](), BROKEN[name]
    more, end = log(STEADY, LOSS, 300 + ROW), 151 if "spike" in name else 199
    longer = {k: np.append(x, more[k]) for k, x in run.items()}
    for rows in (end, end + 1, end + 3, end + 10, end + 50, 600):
        found = readings({k: x[:rows] for k, x in longer.items()}, tmp_path)["history"]
        assert len(found) == 1
        assert re.search(pattern, found[0])
