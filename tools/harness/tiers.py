"""Which tests of the server a run has (`cargo xtask test`).

The quick tier has every test function that is not marked `complete`, and of one with many variants some. The commit
chooses these, and the deployment of a file's tests. What the quick tier leaves out is divided into ten parts, file by
file. Tests marked `shipped` are of packages, installation and the library as it ships, and need its long build. Three
shares of the files run beside each other: tests on the stand-in for a GPU and on several ranks, and two halves of the
others.
"""

import hashlib
import math
import pathlib

import pytest

from harness import left_out

NUM_PARTS = 10
# The quick tier has one of so many variants of a test, rounded up.
VARIANTS_PER_SAMPLE = 10
# The files of the share `gpu`.
FIRST = ("test_gpu", "test_ranks")


def add_options(parser):
    tiers = parser.getgroup("tiers")
    choices = ["all", "tested", "quick", "rest", "shipped"]
    tiers.addoption("--tier", choices=choices, default="all", help="all; tested: all but `shipped`; quick; rest: one --part of the others")
    tiers.addoption("--part", type=int, default=0, help=f"from 0 to {NUM_PARTS - 1}")
    tiers.addoption("--share", choices=["all", "gpu", "even", "odd"], default="all",
                    help=f"gpu: files that begin with {' or '.join(FIRST)}; even, odd: halves of the others")
    tiers.addoption("--seed", default="0", help="chooses the variants of the quick tier")


def deselect(config, items):
    """Leaves the tests that the options choose."""
    tier, part, share = (config.getoption(name) for name in ("tier", "part", "share"))
    quick = chosen_variants(items, config.getoption("seed")) if tier in ("quick", "rest") else set()

    def is_chosen(item):
        is_shipped = item.get_closest_marker("shipped") is not None
        match tier:
            case "all":
                return True
            case "tested":
                return not is_shipped
            case "shipped":
                return is_shipped
            case "quick":
                return item.nodeid in quick
            case "rest":
                return not is_shipped and item.nodeid not in quick and part_of(item.path) == part

    own = [item for item in items if share in ("all", share_of(item.path))]
    chosen = [item for item in own if is_chosen(item)]
    left = set(items).difference(chosen)
    if tier == "quick":
        for item in own:
            if item.nodeid not in quick:
                left_out.write(f"server::{item.nodeid}", why_not_in_quick(item))
    if left:
        config.hook.pytest_deselected(items=list(left))
        items[:] = chosen


def why_not_in_quick(item):
    """Why the quick tier leaves a test out."""
    for mark in ("complete", "shipped"):
        if item.get_closest_marker(mark):
            return f"left out of the quick tier, as it is marked `{mark}`"
    return f"left out of the quick tier, which has one in {VARIANTS_PER_SAMPLE} of its test's variants"


def end(session, status):
    """A share of a part may have no test."""
    if status == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("tier") == "rest":
        session.exitstatus = pytest.ExitCode.OK


def share_of(path):
    """The share of a file, whichever other files there are."""
    if pathlib.Path(path).name.startswith(FIRST):
        return "gpu"
    return ("even", "odd")[number(path) // NUM_PARTS % 2]


def part_of(path):
    """The part of a file, whichever other files there are."""
    return number(path) % NUM_PARTS


def number(path):
    """A number that a file's name determines."""
    return int(hashlib.sha256(pathlib.Path(path).name.encode()).hexdigest(), 16)


def deployment_of(item):
    """The name of the deployment in which a test runs; None for a test that has its own server."""
    return item.callspec.params.get("deployment") if hasattr(item, "callspec") else None


def chosen_variants(items, seed):
    """The node ids of the quick tier. The tests of a file run in one deployment as far as they can, so that its servers
    start once: which one, the seed chooses."""
    functions = {}
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("complete", "shipped")):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)

    def hash_of(name):
        return hashlib.sha256(f"{seed} {name}".encode()).digest()

    def place(item):
        return hash_of(f"{item.path.name} {deployment_of(item)}"), hash_of(item.nodeid)

    chosen = (sorted(variants, key=place)[: math.ceil(len(variants) / VARIANTS_PER_SAMPLE)] for variants in functions.values())
    return {item.nodeid for variants in chosen for item in variants}
