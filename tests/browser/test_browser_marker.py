"""Without a browser the browser tests say that they did not run, and are not green."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.browser import chromium
from tests.helpers import ROOT

BLIND = """
import sys, pytest
from tests.browser import chromium
chromium.executable = lambda: None
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.sweep
def test_without_chromium_nothing_is_green():
    """Negative control: a machine without Chromium, made by hiding it."""
    arguments = ("-m", "browser", "-q", "-rs", "-p", "no:cacheprovider")
    command = [sys.executable, "-c", BLIND, *arguments, "tests/browser/test_browser_use.py"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "browser: 0 ran: not run: no chromium" in result.stdout
    assert "NOT GREEN: browser: 0 ran, 1 required" in result.stdout
    assert "passed" not in result.stdout
    assert result.returncode == 5


@pytest.mark.parametrize("package", ["playwright", "axe_playwright_python"])
def test_a_missing_package_is_named(monkeypatch, package):
    found = chromium.find_spec
    monkeypatch.setattr(chromium, "find_spec", lambda n: None if n == package else found(n))
    assert chromium.missing() == f"not run: no {package}"
