"""Build the wheel and the sdist, and install them in an empty environment."""

import email
import os
import re
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


# The release workflow sets these, and tests the files that it uploads.
DIST = os.environ.get("OPTCLIP_DIST")
REPOSITORY = os.environ.get("OPTCLIP_REPOSITORY") or "https://example.org/owner/optclip"
DOCUMENTATION = os.environ.get("OPTCLIP_DOCUMENTATION") or "https://optclip.example.org"


def run(*command, cwd, **variables):
    environment = os.environ | variables
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the sdist of the checkout, and the wheel from that sdist."""
    if DIST:
        return Path(DIST)
    folder = tmp_path_factory.mktemp("dist")
    run(
        sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT,
        cwd=folder, OPTCLIP_REPOSITORY=REPOSITORY, OPTCLIP_DOCUMENTATION=DOCUMENTATION,
    )  # fmt: skip
    return folder


def metadata(wheel):
    with zipfile.ZipFile(wheel) as file:
        text = file.read(f"optclip-{VERSION}.dist-info/METADATA").decode()
    return email.message_from_string(text)


def test_package_page_renders_and_links_to_existing_files(built):
    run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)
    (wheel,) = built.glob("*.whl")
    page = metadata(wheel)
    readme = page.get_payload()
    targets = re.findall(r"\]\(([^)]*)\)", readme)
    images = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", readme)
    assert images == [f"{REPOSITORY}/raw/v{VERSION}/docs/images/gpt.png"]
    urls = [url.split(", ")[1] for url in page.get_all("Project-URL")]
    assert REPOSITORY in urls
    assert DIST or DOCUMENTATION in urls
    files = rf"{REPOSITORY}/(?:blob|raw)/v{VERSION}/([^#]*)"
    ours = [re.match(files, target) for target in targets + urls]
    paths = {match[1] for match in ours if match}
    assert {"docs/numerics.md", "CONTRIBUTING.md", "SECURITY.md"} < paths
    assert not [path for path in paths if not (ROOT / path).exists()]
    assert not [target for target in targets if not target.startswith("https://")]


def test_checkout_without_address_has_no_urls():
    command = (sys.executable, "-m", "hatchling", "metadata")
    variables = {"OPTCLIP_REPOSITORY": "", "OPTCLIP_DOCUMENTATION": ""}
    assert run(*command, "urls", cwd=ROOT, **variables).strip() == "{}"
    readme = run(*command, "readme", cwd=ROOT, **variables)
    assert "](docs/images/gpt.png)" in readme


def test_sdist_contains_tests_and_tools(built):
    (sdist,) = built.glob("*.tar.gz")
    start = f"optclip-{VERSION}/"
    with tarfile.open(sdist) as file:
        names = {name.removeprefix(start) for name in file.getnames()}
    needed = {
        "AGENTS.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md",
        "SECURITY.md", "run.py", "noxfile.py", "hatch_build.py", "pyproject.toml", ".ci/run",
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
