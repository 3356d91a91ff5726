"""Write the golden checkpoint of this version, and the numbers of its run.

    .nox/stacks/bin/python -m tools.checkpoint

Run it once per release, with the released version, and commit the new folder in
`tests/integration/stacks/golden`. Later versions must restore it.
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
    """Write the checkpoint and the numbers into the folder."""
    run = go_on(start(), 0, BEFORE)
    with tempfile.TemporaryDirectory() as temporary:
        state = pathlib.Path(temporary) / "state"
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(state, run)
            checkpointer.wait_until_finished()
        # This file contains the local path of the checkpoint.
        (state / "commit_success.txt").unlink(missing_ok=True)
        shutil.copytree(state, folder / "state")
    end = go_on(run, BEFORE, BEFORE + AFTER)
    saved_and_end = {"saved": numbers(run), "end": numbers(end)}
    (folder / "numbers.json").write_text(json.dumps(saved_and_end, indent=1) + "\n")


if __name__ == "__main__":
    folder = GOLDEN / optclip.__version__
    folder.mkdir(parents=True)
    make(folder)
    print(f"Wrote {folder}.")
