"""Eight CPU devices, and compiled programs kept between runs."""

import collections
import pathlib
import zlib

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)

# Most of the suite's time is XLA's: what one worker compiled, the others read.
CACHE = pathlib.Path(__file__).parent.parent / ".jax_cache" / jax.__version__
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(params=["eager", "jit"])
def run(request):
    """A function as it is, and compiled."""
    return jax.jit if request.param == "jit" else lambda function: function


@pytest.fixture
def holds(request):
    """Try a property on as many examples as asked for, or on a share of them."""
    # Not above: the environments of TPUs, stacks and the site have no Hypothesis.
    import hypothesis

    count = request.config.getoption("examples")

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


# Collected only if asked for by path: each wants a process or an environment of its own.
ASIDE = [
    pathlib.Path(__file__).parent / name
    for name in ("parity", "release", "site", "stacks", "tpu")
]


def pytest_ignore_collect(collection_path, config):
    given = [config.invocation_params.dir / arg.split("::")[0] for arg in config.args]
    for folder in ASIDE:
        asked = any(path.resolve().is_relative_to(folder) for path in given)
        if collection_path.is_relative_to(folder) and not asked:
            return True
    return None


def pytest_addoption(parser):
    parser.addoption(
        "--examples", type=int, default=1000, help="examples a property (1000)"
    )
    parser.addoption(
        "--sample",
        type=int,
        default=1,
        help="each test for every n-th of its cases (1)",
    )
    parser.addoption(
        "--matrix",
        type=int,
        default=1,
        help="each test marked matrix for every n-th of its cases (1)",
    )


def pytest_collection_modifyitems(config, items):
    cases = collections.defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    kept = set()
    for function, found in cases.items():
        step = config.getoption("sample")
        if found[0].get_closest_marker("matrix"):
            step = max(step, config.getoption("matrix"))
        # Each test begins elsewhere, so that none of what they have in common is left
        # out by all.
        first = zlib.crc32(function.encode()) % min(step, len(found))
        kept.update(found[first::step])
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
