"""What was measured where and when, and on which code, as the page says it."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from benchmarks.verdicts import on_gpu

Case = Mapping[str, Any]


def lines(data: Mapping[str, Any]) -> str:
    """The machines, the versions, the commits and how busy it was."""
    found = [case for part in data["parts"].values() for case in part.values()]
    return "\n".join(
        [*_machines(data, found), *_commits(found), *_remarks(data, found)]
    )


def _machines(data: Mapping[str, Any], found: Sequence[Case]) -> Iterator[str]:
    """Each machine that any case ran on, or versions that it ran with."""
    for number, machine in enumerate(data["machines"]):
        here = [case for case in found if case.get("machine", 0) == number]
        if not here:
            continue
        versions = machine["versions"]
        known = ", ".join(f"{name} {v}" for name, v in versions.items() if v)
        lacking = ", ".join(name for name, v in versions.items() if not v)
        loads = [case["load"] for case in here]
        yield (
            f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB;"
            f" device: {machine['device']}; {machine['platform']}; Python"
            f" {machine['python']}, {known}. {_cases(here)}, load average"
            f" {min(loads)} to {max(loads)}.\n"
        )
        if lacking:
            yield f"Not installed, so left out: {lacking}.\n"


def _commits(found: Sequence[Case]) -> Iterator[str]:
    """Which commits of optclip the cases are of."""
    by_commit = groupby(sorted(found, key=_commit), _commit)
    texts = [f"{commit} ({_cases(list(group))})" for commit, group in by_commit]
    if len(texts) == 1:
        yield f"All of commit {texts[0]}.\n"
    else:
        yield (
            f"**The cases come from {len(texts)} states of the code**, so what one table"
            f" says need not hold with another: commits {'; '.join(texts)}.\n"
        )
    if any("+" in _commit(case) for case in found):
        yield "A plus: with changes that were not committed.\n"


def _remarks(data: Mapping[str, Any], found: Sequence[Case]) -> Iterator[str]:
    """What else to know before reading on."""
    if on_gpu(data):
        yield "TensorFlow is compared on the CPU only.\n"
    if any(case["small"] for case in found):
        yield "**A smoke test on tiny trees: these numbers mean nothing.**\n"


def _commit(case: Case) -> str:
    """The commit of a case, or that it is not known."""
    return case.get("commit") or "unknown"


def _cases(found: Sequence[Case]) -> str:
    """How many cases, and from when to when."""
    dates = sorted(case["date"] for case in found)
    count = f"{len(found)} case{'s' if len(found) > 1 else ''}"
    return f"{count}, {dates[0]} to {dates[-1]}"
