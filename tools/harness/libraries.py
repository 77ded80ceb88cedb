"""Compiles libraries of logits post-processors."""

import subprocess

from harness.repository import ROOT

C_EXAMPLE = ROOT / "examples/logits_processor_c/logits_processors.c"
MISBEHAVING = ROOT / "tests/logits_processors/misbehaving.c"
BAD_TABLE = ROOT / "tests/logits_processors/bad_table.c"


def compile_c(source, library, *options):
    include = ROOT / "include"
    command = ["cc", "-std=c11", "-O1", "-shared", "-fPIC", *options, "-I", include, "-o", library, source]
    subprocess.run(command, check=True)
    return library
