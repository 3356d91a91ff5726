"""Run the authors' code of a method and save the values that tests compare with.

    python -m tests.recipes.official agc CHECKOUT     # writes agc.json in this folder

Each module names the repository to check out, its requirements and any substitutes.
`tests/recipes/test_official.py` reads the files.
"""

import argparse
import importlib
import json
import pathlib

FOLDER = pathlib.Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(
        "tests.recipes.official", description=__doc__.split("\n")[0]
    )
    files = FOLDER.glob("[!_]*.py")
    names = sorted(path.stem for path in files)
    parser.add_argument("name", choices=names, help="the method")
    parser.add_argument("checkout", type=pathlib.Path, help="the authors' code")
    options = parser.parse_args()
    module = importlib.import_module(f"tests.recipes.official.{options.name}")
    text = json.dumps(module.values(options.checkout))
    (FOLDER / f"{options.name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
