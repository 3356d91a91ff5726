"""Check that the paths of a layer exist, and that its queries are not normalized."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

from ._heads import Heads

# Names of normalization layers for queries and keys, in words joined by underscores.
_WORDS = r"(norm|ln|layer_?norm|rms_?norm|rms|l2_?norm|normalization)(_scale)?"
_OF_KEYS = "(k|key|keys|qk)"
_OF_BOTH = "(q|query|queries|k|key|keys|qk)"
_NORMALIZED = re.compile(rf"(attn_)?{_OF_BOTH}_?{_WORDS}|{_WORDS}_?{_OF_BOTH}")
# MLA may normalize the query latent, from which queries are projected. Scaling the
# projection still scales the logits, so only norms of keys are rejected.
_NORMALIZED_MLA = re.compile(rf"(attn_)?{_OF_KEYS}_?{_WORDS}|{_WORDS}_?{_OF_KEYS}")


def check_there(name: str, path: str, paths: Collection[str]) -> None:
    """Raise unless `paths` contains `path`."""
    if path in paths:
        return
    near = difflib.get_close_matches(path, paths, 5, 0.5) or sorted(paths)[:5]
    raise ValueError(
        f"`layers` at '{name}' must name leaves of the parameters, got '{path}'."
        f" Similar paths: {near}."
    )


def check_not_normalized(name: str, heads: Heads, paths: Collection[str]) -> None:
    """Raise if a module next to the query normalizes queries or keys."""
    pattern = _NORMALIZED_MLA if heads.rope else _NORMALIZED
    for query in heads.query_paths:
        words = query.split("/")
        # The query may be a leaf of the attention module, or a module with a kernel.
        above = ["/".join(words[:depth]) for depth in (-1, -2)]
        for path in paths:
            for module in above:
                start = f"{module}/" if module else ""
                rest = path.removeprefix(start)
                if path.startswith(start) and _is_norm(rest.split("/")[0], pattern):
                    raise ValueError(
                        f"The layer '{name}' in `layers` must not normalize its queries"
                        f" or keys, got the norm '{path}'. Scaling the weights does not"
                        " change normalized queries and keys, so it cannot clip the"
                        " logits. Remove the layer from `layers`."
                    )


def _is_norm(word: str, pattern: re.Pattern[str]) -> bool:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word).lower()
    return bool(pattern.fullmatch(re.sub(r"_?\d+$", "", snake).strip("_")))
