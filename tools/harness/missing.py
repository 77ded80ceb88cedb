"""Skips tests that need what the machine lacks."""

import os

import pytest


def skip(test, reason, **options):
    """Skips the running test, and tells the summary of `cargo xtask test`. `options` are those of pytest."""
    if file := os.environ.get("INFLIGHT_SKIPPED_TESTS"):
        with open(file, "a") as skipped:
            skipped.write(f"{test}: {reason}\n")
    pytest.skip(reason, **options)
