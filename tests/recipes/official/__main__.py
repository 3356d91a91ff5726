"""Run the authors' code of a method and save the values that tests compare with.

    python -m tests.recipes.official agc CHECKOUT     # writes agc.json in this folder

Each module names the repository to check out, its requirements and any substitutes.
`tests/recipes/test_official.py` reads the files.
"""

import argparse
import importlib
import json
import pathlib
import runpy
from typing import Any, NamedTuple

FOLDER = pathlib.Path(__file__).resolve().parent


class Checkout(NamedTuple):
    """Hold the folder of the authors' code."""

    folder: pathlib.Path

    def names_of(self, file: str) -> dict[str, Any]:
        """Run a file and return its names."""
        return runpy.run_path(str(self.folder / file))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        "tests.recipes.official", description=__doc__.split("\n")[0]
    )
    names = sorted(path.stem for path in FOLDER.glob("[!_]*.py"))
    parser.add_argument("name", choices=names, help="the method")
    parser.add_argument("checkout", type=pathlib.Path, help="the authors' code")
    options = parser.parse_args()
    module = importlib.import_module(f"tests.recipes.official.{options.name}")
    text = json.dumps(module.values(Checkout(options.checkout)))
    (FOLDER / f"{options.name}.json").write_text(text + "\n")
