#!/usr/bin/env python3
"""Install optclip into `.venv`, then train the demo or run the tests.

    python3 run.py train          # a small GPT; options: `run.py train --help`
    python3 run.py test           # the test suite
    python3 run.py test --full    # hours: all combinations of settings, and up to
                                  # 20,000 examples per property
    .venv/bin/python -m pytest tests/plot    # one folder, after `run.py test`

`test` passes further arguments to pytest: `run.py test --cov`, `run.py test tests/norms
-k inf`. Linting, type checking, tests with other libraries and the site run in nox
sessions with environments of their own: `.venv/bin/nox --list`.

Requires CPython 3.11 or newer. An activated environment, uv or the permission to
install into the system's Python is not needed.
"""

from __future__ import annotations  # So that an older Python gets to find_python.

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent
OLDEST = (3, 11)


def main() -> int:
    """Parse the command line and run the command."""
    command, *rest = sys.argv[1:] or [""]
    if command not in ("train", "test"):
        print(__doc__)
        return 0 if command in ("-h", "--help") else 2
    if command == "train":
        python = environment(find_python(), ["train"])
        return call([python, "examples/train_gpt.py", *rest])
    python = environment(find_python(), ["test", "nox"])
    named = [w for w in rest if "/" in w and (ROOT / w.partition("::")[0]).exists()]
    where = [] if named else ["optclip", "tests"]
    suite = ["-m", "pytest", "-q", *in_parallel(), "--doctest-modules"]
    return call([python, *suite, *where, *rest])


def in_parallel() -> list[str]:
    """Return pytest's options for one worker per core, at most 4 to limit memory."""
    # `-n auto` counts physical cores, so it would use half of a hyperthreaded machine.
    hold = getattr(os, "sched_getaffinity", None)
    cores = len(hold(0)) if hold else os.cpu_count() or 1
    return ["-n", str(min(cores, 4)), "--dist", "worksteal"]


def find_python() -> str:
    """Return this interpreter, or a newer one on the path if this one is too old."""
    if sys.version_info >= OLDEST:
        return sys.executable
    for minor in (13, 14, 12, 11):
        found = find(f"3.{minor}")
        if found:
            return found
    sys.exit(
        f"optclip needs CPython 3.11 or newer; this is {sys.version.split()[0]} and no"
        " newer one is on the path."
    )


def find(wanted: str) -> str | None:
    """Search the path and the folders of version managers for a Python version."""
    home = pathlib.Path.home()
    kept = [".pyenv/versions", ".local/share/uv/python"]
    stored = [p for k in kept for p in home.glob(f"{k}/*/bin/python{wanted}")]
    for python in (shutil.which(f"python{wanted}"), *map(str, sorted(stored))):
        # A version manager's shim on the path may not start an interpreter.
        check = [python, "-c", ""]
        if python and not subprocess.run(check, capture_output=True).returncode:
            return python
    return None


def environment(base: str, groups: list[str]) -> str:
    """Install optclip and these dependency groups into `.venv`; return its Python."""
    stamp = ROOT / ".venv/installed"
    done = stamp.read_text().split() if stamp.exists() else []
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    python = python_in(".venv")
    usable = done and os.path.exists(python)
    if usable and done[0] == wanted and {*groups} <= {*done[1:]}:
        return python
    groups = sorted({*groups, *done[1:]})
    print(f"setting up .venv ({', '.join(groups)}) ...", flush=True)
    if not usable:
        create(base, ".venv")
    install(python, "--editable", ".", *(f"--group={group}" for group in groups))
    stamp.write_text("\n".join([wanted, *groups]))
    return python


def python_in(folder: str) -> str:
    """Return the interpreter of a virtual environment in the checkout."""
    place = "Scripts/python.exe" if os.name == "nt" else "bin/python"
    return str(ROOT / folder / place)


def create(base: str, name: str) -> None:
    """Create a virtual environment with pip, also on systems without ensurepip."""
    folder, python = ROOT / name, python_in(name)
    shutil.rmtree(folder, ignore_errors=True)
    made = subprocess.run([base, "-m", "venv", folder], capture_output=True, text=True)
    if made.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        bare = subprocess.run([base, "-m", "venv", "--without-pip", folder])
        pip = [base, "-m", "pip", "--python", python, "install", "-q", "pip"]
        if bare.returncode or subprocess.run(pip, env=clean()).returncode:
            sys.exit(
                "This Python cannot create a virtual environment with pip:\n"
                f"{made.stdout}{made.stderr}\n"
                "On Debian and Ubuntu, install the packages python3-venv and"
                " python3-pip, then run this again."
            )
    # Older versions do not support dependency groups.
    install(python, "--upgrade", "pip>=25.1")


def install(python: str, *arguments: str) -> None:
    """Install with pip; exit with its message if it fails."""
    # Compiling all modules would take half of the time; Python compiles imported ones.
    options = ["-q", "--disable-pip-version-check", "--no-compile"]
    if call([python, "-m", "pip", "install", *options, *arguments]):
        sys.exit("Could not install; see above. Is a package index reachable?")


def call(command: list[str]) -> int:
    """Run in the checkout without an active environment; print command and time."""
    shown = " ".join(word.replace(f"{ROOT}{os.sep}", "") for word in command)
    print(f"$ {shown}", flush=True)
    start = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, env=clean()).returncode
    took = time.monotonic() - start
    print(f"  {'ok' if code == 0 else f'FAILED ({code})'}, {took:.0f} s", flush=True)
    return code


def clean() -> dict[str, str]:
    """Return the environment variables without those of an active environment.

    Containers often set PYTHONDONTWRITEBYTECODE; each process would then compile all
    of JAX, which takes longer than importing it.
    """
    foreign = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    return {key: value for key, value in os.environ.items() if key not in foreign}


if __name__ == "__main__":
    sys.exit(main())
