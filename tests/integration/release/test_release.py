"""Build the wheel and the sdist, and install them in an empty environment."""

import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def run(*command, cwd):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the sdist of the checkout, and the wheel from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(
        sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT,
        cwd=folder,
    )  # fmt: skip
    return folder


def test_wheel_contains_only_the_package(built):
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"optclip-{VERSION}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"optclip-{VERSION}.dist-info"
    assert {"optclip/__init__.py", "optclip/py.typed"} < names
    assert {name.split("/")[0] for name in names} == {"optclip", info}
    assert f"{info}/licenses/LICENSE" in names
    sources = {
        path.relative_to(ROOT).as_posix() for path in ROOT.glob("optclip/**/*.py")
    }
    assert {name for name in names if name.endswith(".py")} == sources


def test_sdist_contains_tests_and_tools(built):
    (sdist,) = built.glob("*.tar.gz")
    start = f"optclip-{VERSION}/"
    with tarfile.open(sdist) as file:
        names = {name.removeprefix(start) for name in file.getnames()}
    needed = {
        "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md",
        "run.py", "noxfile.py", "pyproject.toml", ".ci/run",
        ".github/workflows/jax.yml", "tests/conftest.py", "docs/methods.md",
        "benchmarks/results/cpu.json",
    }  # fmt: skip
    assert needed < names
    assert not [
        name for name in names if name.startswith((".venv", ".git/", "results"))
    ]


def test_wheel_installs_in_empty_environment(built, tmp_path):
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    run(python, "-m", "pip", "install", "-q", wheel, cwd=tmp_path)
    smoke = Path(__file__).with_name("smoke.py")
    # -I ignores this folder and environment variables.
    assert run(python, "-I", smoke, cwd=tmp_path).strip() == VERSION
