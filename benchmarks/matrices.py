"""Benchmark `matrices`: clipping the singular values of one matrix, against Muon."""

from collections.abc import Iterator

import numpy as np
import optax

import optclip
from benchmarks import trees
from benchmarks.donated_buffers import DonatedTree
from benchmarks.timing import Row, race


def rows(tiny: bool) -> Iterator[Row]:
    for shape in [(16, 24)] if tiny else [(512, 512), (768, 3072), (1024, 1024)]:
        source = trees.numbers(shape, "float32")
        limit, donated = float(np.linalg.norm(source, 2)) / 2, DonatedTree(source)
        contenders = {
            name: donated.clip(tx)
            for name, tx in {
                "optclip, singular values, eigh": optclip.clip_by_singular_value(
                    limit, method="eigh"
                ),
                "optclip, singular values, newton_schulz": (
                    optclip.clip_by_singular_value(limit, method="newton_schulz")
                ),
                "optclip, spectral norm, exact": optclip.clip_by_spectral_norm(limit),
                "optclip, spectral norm, power_iteration": (
                    optclip.clip_by_spectral_norm(limit, method="power_iteration")
                ),
                "optclip, orthogonalization": optclip.clip_by_singular_value(
                    limit, response="normalize", method="newton_schulz"
                ),
                "optax, muon": optax.contrib.scale_by_muon(),
            }.items()
        }
        for row in race(contenders, 2 if tiny else 15, against="optax, muon"):
            yield {"shape": "{} x {}".format(*shape), **row}
