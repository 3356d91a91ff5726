"""Over which mesh axes an array varies, as its type says."""

import types

from optclip._arrays import _axis_names


def test_types_of_an_older_jax_say_it_by_another_name(monkeypatch):
    """Before 0.10.0: `vma`, and nothing of what is unreduced."""
    monkeypatch.setattr(_axis_names, "IS_OLD", True)
    for vma in (frozenset({"data"}), frozenset(), None):
        kind = types.SimpleNamespace(vma=vma)
        assert _axis_names.varying(kind) == (vma or frozenset())
