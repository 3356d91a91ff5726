"""What a measurement depends on: the machine, its load, the versions and the commit."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("optclip", "jax", "jaxlib", "optax", "numpy", "torch", "tensorflow")


def describe() -> dict[str, Any]:
    found = importlib.metadata.distributions()
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory GB": round(pages / 1e9, 1),
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "versions": {d.name: d.version for d in found if d.name in PACKAGES},
    }


def moment() -> dict[str, Any]:
    """The date, how busy the machine is, and the commit, before anything runs."""
    now = datetime.datetime.now(datetime.UTC)
    load = round(os.getloadavg()[0], 2)
    return {"date": f"{now:%Y-%m-%d %H:%M} UTC", "load": load, "commit": _commit()}


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit, with a plus if the package differs from it; None outside git."""
    folder = Path(__file__).parent
    git = ["git", "-C", str(folder)]
    try:
        head = subprocess.check_output(
            [*git, "rev-parse", "--short", "HEAD"], text=True
        )
        differing = subprocess.check_output(
            [*git, "status", "--porcelain", ":/optclip"], text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.strip() + ("+" if differing else "")
