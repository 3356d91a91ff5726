"""All checks; `.ci/run` and the workflow ci.yml run those that plain `nox` runs.

    nox --list                # all sessions; `.venv/bin/nox` after `run.py test`
    nox -s lint types         # two sessions
    nox                       # all checks that a change must pass
    nox -s docs -- serve      # the documentation, at http://localhost:8000
    nox -R -s parity          # without updating the installed packages

Each session installs its dependencies into `.nox` and keeps them; those that need no
more than the suite use its `.venv`. Requires CPython 3.11 or newer, and Python 3.12 or
3.13 for `newest`.
"""

import os
import pathlib
import platform
import random
import sys

import nox

ROOT = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
import run  # noqa: E402

nox.needs_version = ">=2025.5"
nox.options.reuse_venv = "yes"
# Works on systems without ensurepip, since virtualenv includes pip.
nox.options.default_venv_backend = "virtualenv"
# run.py says why these are removed.
for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):
    os.environ.pop(name, None)
# Compiling all of TensorFlow takes long; Python compiles the imported modules.
os.environ["PIP_COMPILE"] = "0"

# Python 3.14 is not supported yet.
NEWEST = run.find("3.13") or run.find("3.12")
OLDEST = [
    each.replace(">=", "==")
    for each in nox.project.load_toml(ROOT / "pyproject.toml")["project"][
        "dependencies"
    ]
]
# The tests that find a break by another JAX. The workflow jax.yml runs the whole suite.
CONTRACTS = [
    f"tests/{name}.py"
    for name in (
        "contracts/test_jax",
        "contracts/test_leaves",
        "contracts/test_optax",
        "contracts/test_registry",
        "contracts/test_together",
        "contracts/test_typing",
        "distributed/test_mapped",
    )
]
# With --full, the first two print the errors of the page on numerics.
HOURS = [
    "tests/norms/test_accuracy.py",
    "tests/spectral/test_singular_value_derivatives.py",
    "tests/contracts/test_properties.py",
    "tests/contracts/test_fuzz.py",
]
HTML = "docs/_build/html"


def install(session: nox.Session, *groups: str) -> None:
    """Install the checkout and dependency groups from pyproject.toml."""
    session.install("pip>=25.1")  # Older versions do not support groups.
    session.install("--editable", ".", *(f"--group={group}" for group in groups))


def tests(session: nox.Session, *where: str) -> None:
    """Run tests in the environment of the session."""
    session.run("python", "-m", "pytest", "-q", *where, *session.posargs)


def integration(session: nox.Session, *options: str, group: str = "") -> None:
    """Run the folder of the session, with the group of its name or another one."""
    install(session, group or session.name)
    tests(session, *options, f"tests/integration/{session.name}")


def suite_of_run(session: nox.Session, *arguments: str) -> None:
    """Run `run.py test`, which creates `.venv` if it is absent."""
    session.run(sys.executable, "run.py", "test", *arguments, external=True)


def in_environment_of_suite(session: nox.Session, *arguments: str) -> None:
    """Run a module in `.venv`, which is created if it is absent."""
    python = run.environment(run.find_python(), ["test", "nox"])
    session.run(python, "-m", *arguments, *session.posargs, external=True)


@nox.session(venv_backend="none")
def suite(session: nox.Session) -> None:
    """Run the suite, in another order each time: no test may depend on earlier ones."""
    seed = f"--random-order-seed={random.randrange(2**15)}"
    suite_of_run(session, "--durations=40", seed, *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Lint and check the format with Ruff."""
    session.install("pip>=25.1")
    session.install("--group=lint")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of the package, benchmarks, user code and every public name."""
    install(session, "types")
    python = str(pathlib.Path(session.bin, "python"))
    session.run("pyright", "--pythonpath", python)
    session.run("python", "tools/check_types.py")


@nox.session(venv_backend="none")
def examples(session: nox.Session) -> None:
    """Run the examples and the notebooks."""
    in_environment_of_suite(session, "pytest", "-q", "tests/integration/examples")


@nox.session
def stacks(session: nox.Session) -> None:
    """Run the page of integrations with model, checkpoint and logging libraries."""
    integration(session)


@nox.session(venv_backend="none")
def benchmarks(session: nox.Session) -> None:
    """Run each benchmark at a tiny size."""
    in_environment_of_suite(session, "pytest", "-q", "tests/integration/benchmarks")


@nox.session(venv_backend="none")
def processes(session: nox.Session) -> None:
    """Train in several processes."""
    in_environment_of_suite(session, "pytest", "-q", "tests/integration/processes")


@nox.session
def tpu(session: nox.Session) -> None:
    """Compile for TPUs; a TPU is not needed."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        session.skip("The TPU compiler requires Linux on x86_64.")
    integration(session)


@nox.session
def gpu(session: nox.Session) -> None:
    """Compile for a GPU; a GPU is not needed."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        session.skip("The GPU compiler requires Linux on x86_64.")
    session.install("pip>=25.1")
    check = ["-m", "pip", "install", "--dry-run", "--group=gpu"]
    # Shows the output of pip only if it fails.
    output = session.run("python", *check, silent=True, success_codes=[0, 1])
    if "No matching distribution" in str(output):
        session.skip("The GPU compiler has no wheel for this Python or system.")
    integration(session, *run.in_parallel())


@nox.session
def parity(session: nox.Session) -> None:
    """Compare with TensorFlow, Keras and PyTorch."""
    integration(session)


@nox.session
def peers(session: nox.Session) -> None:
    """Run clipping tests of optax, Keras and jax_privacy with optclip."""
    integration(session)


@nox.session
def site(session: nox.Session) -> None:
    """Build the site without warnings and check its pages and links."""
    integration(session, group="docs")


@nox.session
def release(session: nox.Session) -> None:
    """Build the wheel and the sdist and install them into an empty environment."""
    integration(session)


@nox.session
def oldest(session: nox.Session) -> None:
    """Test with the oldest supported JAX and optax."""
    session.install("pip>=25.1")
    session.install("--editable", ".", "--group=test", *OLDEST)
    tests(session, *run.in_parallel(), *CONTRACTS)


@nox.session(python=NEWEST)
def newest(session: nox.Session) -> None:
    """Test with the newest supported Python and JAX."""
    if not NEWEST:
        session.skip("No Python 3.13 or 3.12 was found.")
    session.install("pip>=25.1")
    session.install(
        "--upgrade", "--editable", ".", "--group=test", "jax", "jaxlib", "optax"
    )
    tests(session, *run.in_parallel(), *CONTRACTS)


@nox.session(default=False, venv_backend="none")
def coverage(session: nox.Session) -> None:
    """Run the suite and require that it covers every line and branch of the package."""
    suite_of_run(session, "--cov", "--cov-report=term", *session.posargs)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation; `-- serve` serves it, `-- OPTIONS` go to Sphinx."""
    install(session, "docs")
    rest = [word for word in session.posargs if word != "serve"]
    sphinx = ["-m", "sphinx", "-W", "--keep-going", "-q", *rest]
    session.run("python", *sphinx, "docs", HTML)
    if "serve" in session.posargs:
        session.log("http://localhost:8000, Ctrl-C to end")
        server = ["-m", "http.server", "8000", "--bind", "localhost"]
        session.run("python", *server, "--directory", HTML)


@nox.session(default=False, venv_backend="none")
def soak(session: nox.Session) -> None:
    """Minutes: 100,000 steps, with a restart on another number of devices."""
    in_environment_of_suite(session, "pytest", "-q", "tests/integration/soak")


@nox.session(default=False, venv_backend="none")
def bench(session: nox.Session) -> None:
    """An hour: measure speed, memory and compile times into benchmarks/results."""
    in_environment_of_suite(session, "benchmarks")


@nox.session(default=False, venv_backend="none")
def prove(session: nox.Session) -> None:
    """Print worst-case errors and run 20,000 examples per property (hours)."""
    in_environment_of_suite(session, "pytest", "-q", "--full", "-rP", *HOURS)
