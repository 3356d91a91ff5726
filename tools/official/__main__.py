"""Run the authors' code of a method and save the values that tests compare with.

    python -m tools.official agc CHECKOUT     # writes tests/recipes/official/agc.json

Each module names the repository to check out, its requirements and any substitutes.
`tests/recipes/test_official.py` reads the files.
"""

import argparse
import importlib
import json
import pathlib

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "tests/recipes/official"


def main() -> None:
    parser = argparse.ArgumentParser(
        "tools.official", description=__doc__.split("\n")[0]
    )
    files = pathlib.Path(__file__).parent.glob("[!_]*.py")
    names = sorted(path.stem for path in files)
    parser.add_argument("name", choices=names, help="the method")
    parser.add_argument("checkout", type=pathlib.Path, help="the authors' code")
    options = parser.parse_args()
    module = importlib.import_module(f"tools.official.{options.name}")
    text = json.dumps(module.values(options.checkout))
    (FOLDER / f"{options.name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
