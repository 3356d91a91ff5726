"""Compare exact results with the libraries: equal ones and different ones.

Deliberate differences that do not fit these tables are in `test_differences.py`.
"""

import numpy as np
import pytest

from .cases import F32, wide
from .clips import CLIPS, dense, rows

INF, NAN = np.inf, np.nan
X, ZEROS = [np.float32([3, 4])], [np.float32([0, 0])]
BAD = [np.float32([INF, 4]), np.float32([1])]
LARGE, SMALL = [np.float32([3e30, 4e30])], [np.float32([3e-30, 4e-30])]
HALF = [np.float16([300, 400])]
SIGNS = [np.float32([-3, 0.5, 3])]
UNIT = [0.6, 0.8]
CORNER = [np.float32([[-3, 0, 0], [4, 0, 3]])]
PAIR = [np.float32([[-2, 0, 0], [4, 0, 0]]), None, np.float32([1, -2])]
SPARSE = [rows(np.float32([[-3, 1], [4, -1]]), [2, 0], (3, 2))]
PART_SPARSE = [PAIR[0], rows(PAIR[2], [3, 1], (4,))]
EMPTY = [np.zeros((7, 0), F32)]

# Library and clipping, gradients, threshold, result of both.
AGREEMENTS = [
    ("tf value", [np.float32([NAN, INF, -INF])], 4.0, [NAN, 4, -4]),
    ("tf value", EMPTY, 1.0, []),
    ("tf value", SPARSE, 2.0, [2, -1, 0, 0, -2, 1]),
    ("tf norm", CORNER, 6.0, [-3, 0, 0, 4, 0, 3]),
    ("tf norm", ZEROS, 6.0, [0, 0]),
    ("tf norm over 0", CORNER, 4.0, [-2.4, 0, 0, 3.2, 0, 3]),
    ("tf norm over 1", CORNER, 4.0, [-3, 0, 0, 3.2, 0, 2.4]),
    ("tf norm over 1", SPARSE, 2**0.5, [*np.float64([4, -1]) * (2 / 17) ** 0.5, 0, 0, *np.float64([-3, 1]) * 0.2**0.5]),
    ("tf global", PAIR, 4.0, [-1.6, 0, 0, 3.2, 0, 0, 0.8, -1.6]),
    ("tf global", PART_SPARSE, 4.0, [-1.6, 0, 0, 3.2, 0, 0, 0, -1.6, 0, 0.8]),
    ("tf global", PAIR, 6.0, [-2, 0, 0, 4, 0, 0, 1, -2]),
    ("tf global", ZEROS, 6.0, [0, 0]),
    ("tf global", BAD, 6.0, [NAN, NAN, NAN]),
    ("tf average", X, 2.0, [2.4, 3.2]),
    ("tf average", ZEROS, 0.9, [0, 0]),
    ("keras norm", [np.float32([100, 100])], 1.0, [0.5**0.5] * 2),
    ("keras value", [np.float32([100, 100])], 1.0, [1, 1]),
    ("keras global", [np.float32([50, 100])], 1.0, [0.2**0.5, 0.8**0.5]),
    ("keras global", [X[0], None], 1.0, UNIT),
    ("torch norm of order 2.0", PAIR, 4.0, [-1.6, 0, 0, 3.2, 0, 0, 0.8, -1.6]),
    ("torch value", PAIR, 2.0, [-2, 0, 0, 2, 0, 0, 1, -2]),
    ("optax norm", PAIR, 4.0, [-1.6, 0, 0, 3.2, 0, 0, 0.8, -1.6]),
    ("optax value", PAIR, 2.0, [-2, 0, 0, 2, 0, 0, 1, -2]),
    ("optax value", PAIR, 1e6, [-2, 0, 0, 4, 0, 0, 1, -2]),
]  # fmt: skip

# Library and clipping, gradients, threshold, result of the library, result of optclip.
DIFFERENCES = [
    # Negative: optclip raises; a traced number counts as 0.
    ("tf norm", X, -1.0, [0, 0], ValueError),
    ("tf global", X, -1.0, [3, 4], ValueError),
    ("tf average", X, -1.0, [3, 4], ValueError),
    ("tf value", SIGNS, -1.0, [1, 1, 1], ValueError),
    ("keras norm", X, -1.0, [3, 4], ValueError),
    ("keras global", X, -1.0, [3, 4], ValueError),
    ("keras value", X, -1.0, [3, 4], ValueError),
    ("torch norm", X, -1.0, [-0.6, -0.8], ValueError),
    ("torch value", SIGNS, -1.0, [-1, -1, -1], ValueError),
    ("optax norm", X, -1.0, [-0.6, -0.8], ValueError),
    ("optax rms", X, -1.0, [3, 4], ValueError),
    ("optax value", SIGNS, -1.0, [-1, -1, -1], ValueError),
    # NaN: optclip raises.
    ("tf norm", X, NAN, [NAN, NAN], ValueError),
    ("tf global", X, NAN, [NAN, NAN], ValueError),
    ("tf value", X, NAN, [NAN, NAN], ValueError),
    ("keras norm", X, NAN, [3, 4], ValueError),
    ("torch norm", X, NAN, [NAN, NAN], ValueError),
    ("optax norm", X, NAN, [NAN, NAN], ValueError),
    # 0: optclip clips to zero; Keras does not clip.
    ("keras norm", X, 0.0, [3, 4], [0, 0]),
    ("keras global", X, 0.0, [3, 4], [0, 0]),
    ("keras value", X, 0.0, [3, 4], [0, 0]),
    ("tf norm", ZEROS, 0.0, [NAN, NAN], [0, 0]),
    ("optax norm", ZEROS, 0.0, [NAN, NAN], [0, 0]),
    ("optax rms", ZEROS, 0.0, [NAN, NAN], [0, 0]),
    # Infinite threshold: optclip does not change gradients.
    ("tf norm", X, INF, [NAN, NAN], [3, 4]),
    ("tf global", X, INF, [NAN, NAN], [3, 4]),
    ("tf average", X, INF, [NAN, NAN], [3, 4]),
    ("keras norm", X, INF, [NAN, NAN], [3, 4]),
    ("keras global", X, INF, [NAN, NAN], [3, 4]),
    ("torch norm", BAD, INF, [NAN, NAN, NAN], [INF, 4, 1]),
    ("optax norm", BAD, INF, [NAN, NAN, NAN], [INF, 4, 1]),
    ("optax rms", BAD, INF, [NAN, NAN, 1], [INF, 4, 1]),
    # Infinite gradient: optclip returns NaN for the whole norm, as TensorFlow's global
    # norm does.
    ("tf norm", BAD, 1.0, [NAN, 0, 1], [NAN, NAN, 1]),
    ("tf average", BAD, 1.0, [NAN, 0, 1], [NAN, NAN, 1]),
    ("keras norm", BAD, 1.0, [NAN, 0, 1], [NAN, NAN, 1]),
    ("torch norm", BAD, 1.0, [NAN, 0, 0], [NAN, NAN, NAN]),
    ("optax norm", BAD, 1.0, [NAN, 0, 0], [NAN, NAN, NAN]),
    ("optax rms", BAD, 1.0, [NAN, 0, 1], [NAN, NAN, 1]),
    # Large: the libraries' sum of squares overflows, and gradients become 0 or NaN.
    ("tf norm", LARGE, 1.0, [0, 0], UNIT),
    ("tf global", LARGE, 1.0, [NAN, NAN], UNIT),
    ("tf average", LARGE, 0.5, [0, 0], UNIT),
    ("keras norm", LARGE, 1.0, [0, 0], UNIT),
    ("keras global", LARGE, 1.0, [NAN, NAN], UNIT),
    ("torch norm", LARGE, 1.0, [0, 0], UNIT),
    ("optax norm", LARGE, 1.0, [0, 0], UNIT),
    ("optax rms", LARGE, 0.5**0.5, [0, 0], UNIT),
    # float16: squares overflow from 256 on.
    ("tf norm", HALF, 1.0, [0, 0], UNIT),
    ("tf global", HALF, 1.0, [NAN, NAN], UNIT),
    ("keras norm", HALF, 1.0, [0, 0], UNIT),
    ("keras global", HALF, 1.0, [NAN, NAN], UNIT),
    ("optax norm", HALF, 1.0, [0, 0], UNIT),
    ("optax rms", HALF, np.float16(0.5**0.5), [0, 0], UNIT),
    ("torch norm", [np.float16([6e4] * 4)], 1.0, [0] * 4, [0.5] * 4),
    # Small: the libraries' sum of squares underflows, and nothing is clipped.
    ("tf global", SMALL, 1e-30, [3e-30, 4e-30], [0.0, 0.0]),
    ("optax norm", SMALL, 1e-30, [3e-30, 4e-30], [0.0, 0.0]),
    # PyTorch adds 1e-6 to every norm, which is much for small norms.
    ("torch norm", [X[0] * 1e-9], 1e-9, [2.985e-12, 3.98e-12], [6e-10, 8e-10]),
]


def check(call, expected, rtol):
    if isinstance(expected, type):
        with pytest.raises(expected):
            call()
        return
    leaves = [wide(dense(x)).ravel() for x in call() if x is not None]
    np.testing.assert_allclose(np.concatenate(leaves), expected, rtol=rtol)


def named(row):
    return f"{row[0]} at {row[2]}"


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize(
    "row", [*((*row, row[-1]) for row in AGREEMENTS), *DIFFERENCES], ids=named
)
def test_clipping_edge_case_gives_both_results(row):
    name, leaves, limit, their_result, our_result = row
    clip = CLIPS[name]
    low = limit == 1e-9 or any(x is not None and x.dtype == np.float16 for x in leaves)
    rtol = 1e-3 if low else 1e-6
    with np.errstate(all="ignore"):
        check(lambda: clip.theirs(leaves, limit), their_result, rtol)
        check(lambda: clip.transformation(leaves, limit), our_result, rtol)
        check(lambda: clip.functional(leaves, limit)[: len(leaves)], our_result, rtol)
