"""Tells the summary of `cargo xtask test` which tests did not run, and why."""

import os
import pathlib

FILE = os.environ.get("INFLIGHT_SKIPPED_TESTS")


def write(name, reason):
    """A test that does not run, by the name that pytest gives it: its file, `::`, and its function with the variant."""
    if FILE:
        file, _, test = name.partition("::")
        # The reader splits a line at ": ".
        test = test.replace(": ", ":")
        with open(FILE, "a") as lines:
            lines.write(f"{pathlib.Path(file).name}: {test}: {reason}\n")


def logreport(report):
    """The hooks `pytest_runtest_logreport` and `pytest_collectreport`: a test, or a whole file, may skip itself."""
    if report.skipped and not hasattr(report, "wasxfail"):
        _, _, reason = report.longrepr
        write(report.nodeid, reason.removeprefix("Skipped: "))
