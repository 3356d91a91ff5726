"""What a measurement depends on: the machine, its load, and the versions."""

import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("optclip", "jax", "jaxlib", "optax", "numpy", "torch", "tensorflow")


def describe() -> dict[str, Any]:
    """The machine and the versions, as saved beside the samples."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_gb": _memory_gb(),
        "device": jax.devices()[0].device_kind,
        "backend": jax.default_backend(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def moment() -> dict[str, Any]:
    """The date, and how busy the machine is."""
    now = datetime.datetime.now(datetime.UTC)
    return {"date": f"{now:%Y-%m-%d %H:%M} UTC", "load": round(os.getloadavg()[0], 2)}


def cpu_model() -> str:
    """The processor as Linux names it, or as Python does."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gb() -> float | None:
    """The memory in 10^9 bytes, where the system says."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (ValueError, OSError):
        return None


def _version(name: str) -> str | None:
    """The version of a package, None if it is not installed."""
    for each in (name, f"{name}-cpu"):
        try:
            return version(each)
        except PackageNotFoundError:
            continue
    return None


def commit() -> str | None:
    """The commit measured, with a plus if files differ from it."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "optclip") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    """What git answers."""
    done = subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
