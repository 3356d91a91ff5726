"""The rows as a page: every side is run, and what came out is the table."""

import contextlib
import io
import pathlib
import re

import optax

from tests.incumbents import show
from tests.incumbents.rows import ROWS, Row
from tests.incumbents.sides import Side, eager

PATH = pathlib.Path(__file__).resolve().parents[2] / "docs" / "incumbents.md"

INTRO = """\
# Where optax goes wrong, and what optclip gives

Both columns are what came out when the input was run, in three digits; an error is its class.

Remake the page with `python -m tests.incumbents`; a CPU is enough. `tests/test_incumbents.py` holds every
answer of ours to a value worked out by hand, eagerly and under jit, and this page to what a run gives now.
The functions of optclip have the same names, but for `clip` (`clip_by_value`), `clip_by_block_rms`
(`clip_by_rms`), and `adaptive_grad_clip`, in whose place stands `clip_by(ShareOfParams(0.1),
over=optclip.axes(0))`: a rule of one's own, in [sides.py](../tests/incumbents/sides.py).
"""

ADVICE = """\
## Where optax's own wrappers decide

In rows 11, 28 and 29 a wrapper changes what reaches the clip, and a clip of ours inside it does as its own
does: the optax column shows both. What to do instead:

- **11, `inject_hyperparams`** rounds a hyperparameter to the dtype of the parameters. Give the number or the
  schedule to optclip directly: it stays in float32, and `optclip.metrics` reports it each step.
- **25, metrics in a scan.** The state of a clip has one structure from `init` on, so a scan can carry it.
- **26, two of one name.** `name=` names a clip in the metrics; a name that is given twice is numbered.
- **27, jit and eager.** What is not clipped is equal to the bit. What is clipped agrees up to rounding, here
  as in optax: XLA may order sums and products as it likes.
- **28, `flatten`** makes one leaf of all, of one dtype. Leave it out around a clip by leaf.
- **29, `partition` and `masked`** show a clip its own part only. To clip everything by one norm, chain the clip
  in front; to measure everything and scale a part, use `clip_mask=`; to measure a part and scale everything,
  `norm_mask=`; for a norm and a threshold a part, `clip_by_group_norm`.
"""


def observed(row: Row, side: Side) -> str:
    """What a side of a row gives, in a few characters; an error is its class."""
    try:
        # Under jax.debug_nans jax prints that it found one.
        with contextlib.redirect_stdout(io.StringIO()):
            found = row.show(side(eager))
        return show.text(found)
    except Exception as error:
        return type(error).__name__


def made() -> str:
    head = f"| # | input | optax {optax.__version__} | optclip |\n|---|---|---|---|\n"
    return f"{INTRO}\n{head}{''.join(map(_line, ROWS))}\n{ADVICE}"


def _line(row: Row) -> str:
    theirs, ours = observed(row, row.theirs), observed(row, row.ours)
    note = f" ({row.note})" if row.note else ""
    return f"| {row.number} | {row.text} | `{theirs}` | `{ours}`{note} |\n"


def optax_version(text: str) -> str:
    """The version that a page names."""
    return re.search(r"\| optax (\S+) \|", text).group(1)


def without_optax(text: str) -> list[str]:
    """A page short of the column that depends on the version of optax."""
    column = re.compile(r"^(\|(?:[^|]*\|){2})[^|]*\|")
    return [column.sub(r"\1", line) for line in text.splitlines()]
