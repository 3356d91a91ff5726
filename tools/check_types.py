"""Check with pyright that every public name has a complete type. Run as a script."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        # pyright does not verify the types of an editable installation.
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
        quiet = ["--disable-pip-version-check", "--root-user-action=ignore"]
        subprocess.run([*pip, *quiet, "--target", folder, ROOT], check=True)
        command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
        command += ["--outputjson", "--verifytypes", "optclip", "--ignoreexternal"]
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder},
        )
    report = json.loads(result.stdout)["typeCompleteness"]
    score = report["completenessScore"]
    names = sum(symbol["isExported"] for symbol in report["symbols"])
    print(f"types complete: {score:.1%} of {names} public symbols")
    for symbol in report["symbols"]:
        if symbol["isExported"] and not symbol["isTypeKnown"]:
            print(" ", symbol["name"], [d["message"] for d in symbol["diagnostics"]])
    return 0 if names and score == 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
