"""Pytest set-up: pinned threads, strict JAX, and markers that cannot turn green without running."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import os
import re
import time

# Before jax and torch are imported: two workers must not fight over two cores.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# `make test` compiles thousands of programs that run once. XLA compiles small ones twice as fast
# with its older code generator, and large ones in a tenth less time if it does not split them for
# threads that a worker does not have. Nights compile as users do. XLA ends the process at a flag
# that it does not know, so only versions that were seen to know these get them.
os.environ["XLA_FLAGS"] += (
    " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "1"
    and importlib.metadata.version("jaxlib").startswith("0.10.")
    else ""
)

import jax
import pytest
from _pytest.mark.expression import Expression

from tests.annotations import check_annotations
from tests.browser import chromium
from tests.sweeps import DAYS, Sweeps, is_sweep

jax.config.update("jax_numpy_dtype_promotion", "strict")
# Meshes of the tests: virtual devices, which must be asked for before the first is used.
if "xla_force_host_platform_device_count" not in os.environ["XLA_FLAGS"]:
    jax.config.update("jax_num_cpu_devices", 8)

# Annotated signatures are checked while testing. The hooks stay: most modules are imported by the
# tests that need them.
check_annotations()

# The same kernels in each process on a GPU, as in nights; before the first device is used.
importlib.import_module("reports.provenance.gpu").repeatable()

pytest_plugins = ["megalodon_numerics.pytest_plugin"]
MAPS = 30_000
"""Memory maps of a process above which compiled programs are thrown away. Linux allows 65,530; XLA
takes some for each of the hundreds of modules of a program, and dies where there are no more."""
LONG = 0.5
"""Seconds of a test that may have compiled enough to matter."""
GUARDED = ("torch_ref", "cuda", "browser", "flax_models", "trackers", "ray", "s3")


def pytest_addoption(parser):
    parser.addoption(
        "--require-run",
        action="append",
        default=[],
        type=requirement,
        metavar="MARKER:N",
        help="fail unless at least N tests with MARKER were executed (repeatable)",
    )
    parser.addoption(
        "--traced-checks",
        choices=("marked", "always"),
        default="marked",
        help="which tests trace their programs with the model's checks on traced values",
    )
    parser.addoption(
        "--sweep-day",
        choices=DAYS,
        help="of the sweeps run only those of this day of the week",
    )
    parser.addoption(
        "--reference",
        choices=("auto", "live", "recorded"),
        default="auto",
        help="what torch_ref tests compare with; auto takes the live reference when it can run",
    )


def pytest_configure(config):
    config.pluginmanager.register(GuardedMarkers(config))
    config.pluginmanager.register(Sweeps(config))


def pytest_report_header(config):
    from parity.megalodon.reference import why_unavailable

    asked = config.getoption("--reference")
    reason = why_unavailable()
    live = asked == "live" or (asked == "auto" and reason is None)
    kind = "live megalodon-hf" if live else f"recordings of megalodon-hf ({reason or 'asked for'})"
    devices = ", ".join(sorted({device.platform for device in jax.devices()}))
    checks = "every test" if config.getoption("--traced-checks") == "always" else "marked tests"
    return [
        f"torch_ref compares with: {kind}",
        f"jax {jax.__version__} on {devices}",
        f"checks on traced values: in {checks}",
        f"sweeps: {config.getoption('--sweep-day') or 'of every day'}",
    ]


@pytest.fixture
def x64():
    """64-bit types, for what is compared with float64."""
    with jax.enable_x64(True):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Leave the checks on traced values out of the programs of tests that are not about them.

    A check is a callback, and JAX stores no program with a callback between runs.
    """
    from megalodon_jax import traced_checks

    always = item.config.getoption("--traced-checks") == "always"
    marked = item.get_closest_marker("traced_checks") is not None
    begun = time.perf_counter()
    with traced_checks(always or marked), optimised(item):
        result = yield
    # Reading thousands of maps takes milliseconds, which a test that compiles has.
    if time.perf_counter() - begun > LONG and memory_maps() > MAPS:
        jax.clear_caches()
    return result


@contextlib.contextmanager
def optimised(item):
    """Compile with all optimisations where `item` is marked so and this run does without them.

    Sweeps are: they judge levels and train for long, and no run that is in a hurry has all of them.
    """
    flag = "jax_disable_most_optimizations"
    marked = item.get_closest_marker("optimised") is not None or is_sweep(item)
    if not jax.config.values[flag] or not marked:
        yield
        return
    jax.config.update(flag, False)
    try:
        yield
    finally:
        jax.config.update(flag, True)


def memory_maps():
    """How many memory maps this process has; 0 where that cannot be read."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps)
    except OSError:
        return 0


def pytest_collection_modifyitems(items):
    reasons = {name: reason for name in GUARDED if (reason := missing(name))}
    for item in items:
        for name, reason in reasons.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session):
    """Collect nothing where -m selects only tests that cannot run here: the answer is the same.

    Importing all tests takes most of a minute of a machine without a GPU. Workers of pytest-xdist
    collect anyway, since their controller waits for what they found.
    """
    config = session.config
    expression = config.getoption("-m")
    distributed = hasattr(config, "workerinput") or getattr(config.option, "numprocesses", None)
    if expression and not distributed and not may_run(expression):
        return True
    return None


def may_run(expression):
    """Whether a -m expression can select a test that has no guarded marker that cannot run here."""
    try:
        compiled = Expression.compile(expression)
    except Exception:  # pytest says what is wrong with it
        return True
    free = sorted(set(re.findall(r"\w+", expression)) - {"and", "or", "not"})
    absent = {name for name in GUARDED if name in free and missing(name)}
    choices = itertools.product(*([False] if name in absent else [False, True] for name in free))
    for choice in choices:
        marks = dict(zip(free, choice, strict=True))
        if compiled.evaluate(lambda name, /, marks=marks, **_: marks.get(name, True)):
            return True
    return False


class GuardedMarkers:
    """Counts executed tests per guarded marker, and refuses success where too few ran.

    A marker named in `-m` must run at least one test; `--require-run` can ask for more.
    """

    def __init__(self, config):
        self.ran = dict.fromkeys(GUARDED, 0)
        selected = [name for name in GUARDED if names(config.getoption("-m") or "", name)]
        self.required = dict.fromkeys(selected, 1) | dict(config.getoption("--require-run"))

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and not report.skipped:
            for name in GUARDED:
                self.ran[name] += name in report.keywords

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session, exitstatus):
        on_worker = hasattr(session.config, "workerinput")
        if not on_worker and exitstatus == pytest.ExitCode.OK and self.unmet():
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

    def pytest_terminal_summary(self, terminalreporter):
        for name in self.required:
            reason = None if self.ran[name] else missing(name)
            terminalreporter.write_line(": ".join(filter(None, (name, self.count(name), reason))))
        for name in self.unmet():
            line = f"NOT GREEN: {name}: {self.count(name)}, {self.required[name]} required"
            terminalreporter.write_line(line, red=True)

    def unmet(self):
        return [name for name, count in self.required.items() if self.ran[name] < count]

    def count(self, name):
        return f"{self.ran[name]} ran"


def missing(name):
    """Return why tests with a guarded marker cannot run, or None."""
    if name == "browser":
        return chromium.missing()
    if name == "cuda" and all(device.platform != "gpu" for device in jax.devices()):
        return "no CUDA device"
    if name == "flax_models":
        return no_flax_models()
    if name == "trackers":
        return not_installed(("mlflow", "wandb"), "mlflow,wandb")
    if name == "ray":
        return not_installed(("ray",), "ray")
    if name == "s3":
        return not_installed(("s3fs", "moto", "flask", "flask_cors"), "s3,s3-tests")
    return None


def not_installed(modules, extra):
    """Return which modules are not installed and the command that installs them, or None."""
    # Here, because the hook above has to see the first import of the package.
    from megalodon_jax.extras import install

    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"no {', '.join(absent)}: {install(extra)}" if absent else None


def no_flax_models():
    """Return why Flax models of Transformers cannot be compared with their originals, or None."""
    if absent := not_installed(("flax", "torch", "transformers"), "dev"):
        return absent
    found = importlib.metadata.version("transformers")
    if int(found.partition(".")[0]) >= 5:
        return f"transformers {found} has no Flax models: pip install 'transformers<5'"
    return None


def names(expression, marker):
    """Whether a -m expression asks for a marker rather than excludes it."""
    asked = re.sub(r"\bnot\s+\w+|\bnot\s*\([^()]*\)", "", expression)
    return re.search(rf"\b{marker}\b", asked) is not None


def requirement(text):
    marker, _, count = text.partition(":")
    if marker not in GUARDED or not count.isdigit():
        raise pytest.UsageError(
            f"--require-run {text}: expected MARKER:N with MARKER one of {', '.join(GUARDED)}"
        )
    return marker, int(count)


@pytest.fixture(scope="session")
def reference(request):
    """What torch_ref tests compare with: live, or its recordings."""
    from parity.megalodon.suite import choose_reference

    return choose_reference(request.config.getoption("--reference"))
