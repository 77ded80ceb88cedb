"""One browser for all tests, and the commands whose pages it opens."""

import os
import subprocess

import pytest

from harness import left_out
from harness.browser import Browser

pytest_runtest_logreport = pytest_collectreport = left_out.logreport


@pytest.fixture(scope="session")
def browser():
    with Browser(os.environ["CHROMIUM"]) as browser:
        yield browser


def xtask(*arguments):
    """Runs `cargo xtask ARGUMENTS`; returns the exit status and standard error."""
    done = subprocess.run([os.environ["XTASK"], *map(str, arguments)], stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr
