"""Configure JAX, the compilation cache, and the fixtures of all tests."""

import ctypes
import gc
import math
import os
import pathlib

import jax
import pytest

from tests.support import compiler, covering

jax.config.update("jax_num_cpu_devices", 8)

# XLA takes most of the suite's time, so workers share compiled programs.
CACHE = pathlib.Path(__file__).parent.parent / ".jax_cache" / jax.__version__
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# Lowering would store the call stack of each operation, a tenth of its time.
jax.config.update("jax_traceback_in_locations_limit", 0)


# Above this, compiled programs are cleared: a worker would grow to several gigabytes.
# Four workers then take at most half of the memory. Compiling single operations again
# after each file takes a twentieth of the suite's time.
LEAST_RESIDENT_BYTES, MOST_RESIDENT_BYTES = 1500 * 2**20, 2500 * 2**20


def max_resident_bytes() -> float:
    """Return an eighth of the memory, within limits."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return LEAST_RESIDENT_BYTES
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(LEAST_RESIDENT_BYTES, min(memory / 8, MOST_RESIDENT_BYTES))


def resident_bytes() -> float:
    """Return the memory of this process, infinity where the system does not say."""
    statm = pathlib.Path("/proc/self/statm")
    if not statm.exists():
        return math.inf
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class BoundedMemory:
    """Clear compiled programs after a file, unless there is memory for them.

    Files share the programs of single operations, a tenth of the suite's time. This is
    a plugin, since fixtures of this folder do not apply to the package's doctests.
    """

    def pytest_collection_finish(self):
        # Modules and tests live until the end, so garbage collection can skip them.
        gc.collect()
        gc.freeze()
        # Tracing makes many objects; by default Python collects after 700 of them.
        gc.set_threshold(20_000)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item, nextitem):
        is_last = nextitem is None or nextitem.path != item.path
        if not is_last or resident_bytes() < max_resident_bytes():
            return
        jax.clear_caches()
        # The C library of Linux holds on to freed memory, two thirds of the worker's.
        if os.name == "posix" and hasattr(ctypes.CDLL(None), "malloc_trim"):
            ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def run(request):
    """Return a function that compiles its argument, or returns it unchanged.

    A test with this fixture runs twice, eagerly and compiled, unless its `covering`
    marker chooses the cases.
    """
    # Imported here, since some nox sessions lack its dependencies.
    from tests.support import helpers

    return helpers.optimized_jit if request.param == "jit" else lambda f: f


@pytest.fixture
def holds(request):
    """Return a function that checks a property on the chosen number of examples."""
    # Imported here, since some nox sessions lack Hypothesis.
    import hypothesis

    config = request.config
    count = config.getoption("examples") or (
        20_000 if config.getoption("full") else 300
    )

    def check(prop, strategy, share=1.0):
        settings = hypothesis.settings(
            max_examples=max(int(share * count), 1),
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        settings(hypothesis.given(strategy)(prop))()

    return check


# Collected only on request: each needs processes or an environment of its own, and has
# a nox session.
ASIDE = [
    path
    for path in (pathlib.Path(__file__).parent / "integration").iterdir()
    if path.is_dir()
]


def pytest_ignore_collect(collection_path, config):
    if collection_path not in ASIDE:
        return None
    given = [config.invocation_params.dir / arg.split("::")[0] for arg in config.args]
    asked = any(path.resolve().is_relative_to(collection_path) for path in given)
    return None if asked else True


def pytest_addoption(parser):
    parser.addoption(
        "--full",
        action="store_true",
        help="all products of settings, and 20,000 examples of each property",
    )
    parser.addoption(
        "--examples", type=int, help="examples of each property (300, or 20,000)"
    )


def pytest_configure(config):
    config.pluginmanager.register(BoundedMemory())
    covering.full = config.getoption("full")
    # What the TPU's compiler optimizes is the subject of its tests.
    if not covering.full and not any("integration/tpu" in arg for arg in config.args):
        compiler.make_quick_default()


def pytest_collection_modifyitems(config, items):
    """Deselect the tests that are marked `full`, unless pytest runs with `--full`."""
    if covering.full:
        return
    slow = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not item.get_closest_marker("full")]


def pytest_generate_tests(metafunc):
    """Parametrize tests that are marked `covering`; see tests/support/covering.py."""
    marker = metafunc.definition.get_closest_marker("covering")
    settings = dict(marker.kwargs) if marker else {}
    if "run" in metafunc.fixturenames and "run" not in settings:
        metafunc.parametrize("run", covering.RUNS, indirect=True)
    if marker is None:
        return
    where = settings.pop("where", None)
    cases = (covering.product if covering.full else covering.pairs)(settings, where)
    metafunc.parametrize(
        ",".join(settings),
        cases if len(settings) > 1 else [value for (value,) in cases],
        ids=["-".join(map(_id, case)) for case in cases],
        indirect=["run"] if "run" in settings else [],
    )


def _id(value):
    for name in ("id", "__name__", "name"):
        if isinstance(getattr(value, name, None), str):
            return getattr(value, name)
    # An address would differ between workers.
    return type(value).__name__ if " at 0x" in str(value) else str(value)
