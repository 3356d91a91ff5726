"""The checkpoint of this version, and the numbers that later ones must go on to.

    .nox/stacks/bin/python -m tools.checkpoint

Run it once, when a version is released, and commit what it wrote in
`tests/integration/stacks/golden`; never again for a version that was: a checkpoint which
that version did not write proves nothing.
"""

import json
import pathlib
import shutil
import tempfile

import orbax.checkpoint as ocp

import optclip
from tests.integration.stacks.checkpoints import (
    AFTER,
    BEFORE,
    GOLDEN,
    go_on,
    numbers,
    start,
)


def make(folder: pathlib.Path) -> None:
    """The checkpoint of this version, and what its run comes to."""
    run = go_on(start(), 0, BEFORE)
    with tempfile.TemporaryDirectory() as made:
        state = pathlib.Path(made) / "state"
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(state, run)
            checkpointer.wait_until_finished()
        # It says where it was saved, which is no one else's folder.
        (state / "commit_success.txt").unlink(missing_ok=True)
        shutil.copytree(state, folder / "state")
    end = go_on(run, BEFORE, BEFORE + AFTER)
    said = {"saved": numbers(run), "end": numbers(end)}
    (folder / "numbers.json").write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    folder = GOLDEN / optclip.__version__
    folder.mkdir(parents=True)
    make(folder)
    print(f"made {folder}")
