"""Describe the conditions of a measurement: machine, load, versions and commit."""

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import jax

PACKAGES = (
    "optclip", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "optax",
    "numpy", "torch", "tensorflow",
)  # fmt: skip
DRIVER = Path("/proc/driver/nvidia/version")


def describe() -> dict[str, Any]:
    packages = importlib.metadata.distributions()
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory GB": round(pages / 1e9, 1),
        **_device(),
        "python": platform.python_version(),
        "versions": {p.name: p.version for p in packages if p.name in PACKAGES},
    }


def moment() -> dict[str, Any]:
    """Return the date, the load of the machine, and the commit."""
    now = datetime.datetime.now(datetime.UTC)
    load = round(os.getloadavg()[0], 2)
    return {"date": f"{now:%Y-%m-%d %H:%M} UTC", "load": load, "commit": _commit()}


def _device() -> dict[str, Any]:
    """Return the device's kind, the memory that JAX can use, and a GPU's driver."""
    device = jax.devices()[0]
    description: dict[str, Any] = {"device": device.device_kind}
    if memory := device.memory_stats():
        description["device memory GB"] = round(memory["bytes_limit"] / 1e9, 1)
    if device.platform == "gpu" and DRIVER.exists():
        version = re.search(r"\d+\.\d+(\.\d+)?", DRIVER.read_text())
        description["driver"] = version[0] if version else None
    return description


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit, with "+" for uncommitted package changes; None outside git."""
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
