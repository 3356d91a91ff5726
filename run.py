#!/usr/bin/env python3
"""Set up all that is needed in `.venv`, then train, test, show, prove or measure.

    python3 run.py train         # the main job: see examples/train_char_rnn.py --help
    python3 run.py test          # the test suite
    python3 run.py test --all    # with linters, types, coverage, the real TensorFlow,
                                 # Keras and PyTorch to compare with, the compiler of
                                 # TPUs, a wheel in an empty environment, the
                                 # libraries of docs/stacks.md, the site, and Python
                                 # 3.13 if found
    python3 run.py docs          # the documentation, built and shown on this machine;
                                 # --build builds it, and does not show it
    python3 run.py bench         # hours: speed, memory, compile times, beside optax,
                                 # PyTorch and TensorFlow, into docs/performance.md
    python3 run.py prove         # hours: the worst errors over many cases, properties
                                 # with 20,000 examples each, as many hostile calls
                                 # in all, faults put in on purpose

Needs CPython 3.11 or newer and nothing else: no uv, no activated environment, and no
permission to install into the system's Python.
"""

from __future__ import annotations  # So that an older Python gets to find_python.

import argparse
import concurrent.futures
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent
OLDEST = (3, 11)
NEWEST = "3.13"
HTML = "docs/_build/html"
PORT = 8000
# The newest Python, with the newest JAX, runs each test for one case in so many: an odd
# number, so that eager and compiled take turns.
SAMPLE = 5
# What starts processes and notebooks, or writes pages anew, is the same there.
SAME_ANYWHERE = ("examples", "incumbents", "notebooks", "processes", "spikes")


def main() -> int:
    """Parse the command, find a Python, do it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["train", "test", "docs", "prove", "bench"])
    parser.add_argument(
        "--all", action="store_true", help="test: linters, types, all else; see above"
    )
    parser.add_argument("--build", action="store_true", help="docs: do not show them")
    options, rest = parser.parse_known_args()
    base = find_python()
    if options.command == "train":
        python = environment(base, ".venv", ["train"])
        return call([python, "examples/train_char_rnn.py", *rest])
    if options.command == "prove":
        return prove(base, rest)
    if options.command == "docs":
        return docs(base, rest, show=not options.build)
    if options.command == "bench":
        python = environment(base, ".venv", ["bench"])
        return call([python, "-m", "benchmarks", *rest])
    return test(base, rest, everything=options.all)


def test(base: str, rest: list[str], *, everything: bool) -> int:
    """Run all parts, each in a process of its own; 0 if none failed."""
    groups = ["test", "lint", "parity", "release"] if everything else ["test"]
    python = environment(base, ".venv", groups)
    suite = ["-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "4"]
    suite += ["--dist", "loadgroup"]
    whole = [python, *suite, "--doctest-modules", "optclip", "tests", *rest]
    if not everything:
        return call(whole)
    apart = [
        [python, "-m", "pytest", "-q", "tests/parity"],
        [python, "-m", "pytest", "-q", "tests/release"],
    ]
    if (sys.platform, platform.machine()) == ("linux", "x86_64"):
        # The compiler alone: there need be no TPU.
        compiler = environment(base, ".venv-tpu", ["tpu"])
        apart.append([compiler, "-m", "pytest", "-q", "tests/tpu"])
    stacks = environment(base, ".venv-stacks", ["stacks"])
    apart.append([stacks, "-m", "pytest", "-q", "tests/stacks"])
    site = environment(base, ".venv-docs", ["docs"])
    apart.append([site, "-m", "pytest", "-q", "tests/site"])
    parts = [
        [python, "-m", "ruff", "check"],
        [python, "-m", "ruff", "format", "--check"],
        [python, "-m", "pyright", "--pythonpath", python],
        [python, "tests/check_types.py"],
        [*whole, "--cov", "--cov-report=term", "--durations=40"],
    ]
    newest = find(NEWEST)
    if newest and version(base) != NEWEST:
        other = environment(newest, f".venv-{NEWEST}", ["test", "release"])
        ignored = [f"--ignore=tests/test_{name}.py" for name in SAME_ANYWHERE]
        sample = ["--sample", str(SAMPLE)]
        parts.append([other, *suite, "tests", *ignored, *rest, *sample])
        apart.append([other, "-m", "pytest", "-q", "tests/release"])
    codes = [call(part) for part in parts]
    # These have a process each, and leave a core idle.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        codes += pool.map(functools.partial(call, at_end=True), apart)
    return next((code for code in codes if code), 0)


def prove(base: str, rest: list[str]) -> int:
    """The long proofs, one after the other; 0 if none failed."""
    python = environment(base, ".venv", ["test", "prove"])
    many = [
        f"tests/test_{name}.py" for name in ("properties", "fuzz", "fuzz_histories")
    ]
    parts = [
        [python, "-m", "tests.accuracy"],
        [python, "-m", "tests.bounds"],
        [python, "-m", "pytest", "-q", *many, "--examples", "20000"],
        [python, "-m", "tests.mutation", *rest],
    ]
    codes = [call(part) for part in parts]
    return next((code for code in codes if code), 0)


def docs(base: str, rest: list[str], *, show: bool) -> int:
    """Build the documentation, then serve it until the user has seen enough."""
    python = environment(base, ".venv-docs", ["docs"])
    sphinx = ["-m", "sphinx", "-W", "--keep-going", "-q", *rest]
    code = call([python, *sphinx, "docs", HTML])
    if code or not show:
        return code
    with socket.socket() as probe:
        if not probe.connect_ex(("localhost", PORT)):
            sys.exit(f"Port {PORT} is in use. Free it, or open {HTML}/index.html.")
    print(f"http://localhost:{PORT}, Ctrl-C to end", flush=True)
    server = ["-m", "http.server", str(PORT), "--bind", "localhost"]
    try:
        return call([python, *server, "--directory", HTML])
    except KeyboardInterrupt:
        return 0


def find_python() -> str:
    """This interpreter, or a newer one on the path if this one is too old."""
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
    """A Python of that version on the path or where version managers keep theirs."""
    home = pathlib.Path.home()
    kept = [".pyenv/versions", ".local/share/uv/python"]
    stored = [p for k in kept for p in home.glob(f"{k}/*/bin/python{wanted}")]
    for python in (shutil.which(f"python{wanted}"), *map(str, sorted(stored))):
        # A version manager's name on the path need not start anything.
        check = [python, "-c", ""]
        if python and not subprocess.run(check, capture_output=True).returncode:
            return python
    return None


def version(python: str) -> str:
    """Its version, as 3.13."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.check_output([python, "-c", code], text=True).strip()


def environment(base: str, name: str, groups: list[str]) -> str:
    """The Python of a virtual environment that holds optclip and these groups."""
    folder = ROOT / name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = folder / "installed"
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    done = stamp.read_text().split() if stamp.exists() else []
    if python.exists() and done[:1] == [wanted] and set(groups) <= set(done[1:]):
        return str(python)
    groups = sorted({*groups, *done[1:]})
    print(f"setting up {name} ({', '.join(groups)}) ...", flush=True)
    if not (python.exists() and done):
        create(base, folder, python)
    arguments = [word for group in groups for word in ("--group", group)]
    install(str(python), ["--editable", ".", *arguments])
    stamp.write_text("\n".join([wanted, *groups]))
    return str(python)


def create(base: str, folder: pathlib.Path, python: pathlib.Path) -> None:
    """A fresh environment with pip, also where the system keeps ensurepip back."""
    shutil.rmtree(folder, ignore_errors=True)
    made = subprocess.run([base, "-m", "venv", folder], capture_output=True, text=True)
    if made.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        bare = subprocess.run([base, "-m", "venv", "--without-pip", folder])
        pip = [base, "-m", "pip", "--python", str(python), "install", "-q", "pip"]
        if bare.returncode or subprocess.run(pip, env=clean()).returncode:
            sys.exit(
                "This Python can make no virtual environment with pip:\n"
                f"{made.stdout}{made.stderr}\n"
                "On Debian and Ubuntu, install the packages python3-venv and"
                " python3-pip, then run this again."
            )
    install(str(python), ["--upgrade", "pip>=25.1"])


def install(python: str, arguments: list[str]) -> None:
    """Install with pip; stop with its own words if it cannot."""
    command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if call([*command, *arguments]):
        sys.exit("Could not install; see above. Is a package index reachable?")


def call(command: list[str], *, at_end: bool = False) -> int:
    """Run in the checkout, free of any other environment; say what and how long.

    `at_end` prints nothing before it ends, so that several may run at once.
    """
    shown = " ".join(word.replace(f"{ROOT}{os.sep}", "") for word in command)
    if not at_end:
        print(f"$ {shown}", flush=True)
    start = time.monotonic()
    to = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if at_end else {}
    done = subprocess.run(command, cwd=ROOT, env=clean(), text=True, **to)
    took, code = time.monotonic() - start, done.returncode
    said = f"$ {shown}\n{done.stdout}" if at_end else ""
    print(
        f"{said}  {'ok' if code == 0 else f'FAILED ({code})'}, {took:.0f} s", flush=True
    )
    return code


def clean() -> dict[str, str]:
    """The environment without what an activated one would add."""
    foreign = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {key: value for key, value in os.environ.items() if key not in foreign}


if __name__ == "__main__":
    sys.exit(main())
