"""JAX models that people run hold against Transformers; what differs in them, and a bug, is named.

Each file runs in its own process, without the tests' virtual devices and strict promotion.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT

FOLDER = ROOT / "examples" / "libraries"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
DOCUMENT = (ROOT / "docs" / "your-own-port.md").read_text(encoding="utf-8")
SCRIPT = """
import json, re, runpy, sys, warnings
warnings.simplefilter("ignore")
try:
    own = runpy.run_path(sys.argv[1])
except ModuleNotFoundError as error:
    print(json.dumps({"missing": error.name}))
    raise SystemExit
from parity import compare
found = {}
for name in ("port", *own["NAMED"]):
    report = compare(own[name]())
    # The first line that the report points at.
    pointed = re.search("^ *> +[0-9]+ (.*)$", report.text(), re.M)
    found[name] = report.holds, report.sentence(), pointed.group(1) if pointed else ""
print(json.dumps(found))
"""


def constants(name: str) -> dict[str, object]:
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    return {
        target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in ("INSTALL", "NAMED")
    }


@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES)
def test_a_library_s_model_holds_and_what_differs_is_named(name: str) -> None:
    given = constants(name)
    # Not empty: EasyDeL then sets flags for GPUs, which XLA refuses on a CPU.
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(FOLDER / f"{name}.py")],
        env=environment | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
        timeout=900,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    if "missing" in found:
        pytest.skip(f"no {found['missing']}: {given['INSTALL']}")
    holds, sentence, *_ = found.pop("port")
    assert holds, sentence
    assert found.keys() == given["NAMED"].keys()
    for which, (holds, sentence, line) in found.items():
        assert not holds and given["NAMED"][which] in line, (which, sentence, line)


def test_the_document_has_every_library() -> None:
    for name in NAMES:
        rows = [line for line in DOCUMENT.splitlines() if line.startswith(f"| `{name}` ")]
        assert len(rows) == 2
        versions = [word.partition("==")[2] for word in constants(name)["INSTALL"].split()[2:]]
        assert all(version in rows[0] for version in versions)
