"""What `tests/recipes/test_official.py` compares with, made anew from others' code.

    python -m tools.official agc CHECKOUT     # writes tests/recipes/official/agc.json

Each file of this folder says which code, what it needs and what is put in for it.
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
    parser.add_argument("name", choices=names)
    parser.add_argument("checkout", type=pathlib.Path)
    options = parser.parse_args()
    module = importlib.import_module(f"tools.official.{options.name}")
    found = json.dumps(module.values(options.checkout))
    (FOLDER / f"{options.name}.json").write_text(found + "\n")


if __name__ == "__main__":
    main()
