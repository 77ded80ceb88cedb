"""The symbols that the library exports and imports.

It is linked with BIND_NOW: one function that the server lacks fails the load of every model."""

import os
import pathlib
import platform
import re
import subprocess

import pytest

from harness.repository import ROOT

pytestmark = pytest.mark.shipped

# The oldest supported server.
OLDEST_SERVER = ROOT / "tests/server/symbols/server-2.51.0.txt"
ENTRY_POINTS = {
    "INFLIGHT_RankMain",
    "TRITONBACKEND_Finalize",
    "TRITONBACKEND_GetBackendAttribute",
    "TRITONBACKEND_Initialize",
    "TRITONBACKEND_ModelBatchFinalize",
    "TRITONBACKEND_ModelBatchIncludeRequest",
    "TRITONBACKEND_ModelBatchInitialize",
    "TRITONBACKEND_ModelBatcherFinalize",
    "TRITONBACKEND_ModelBatcherInitialize",
    "TRITONBACKEND_ModelFinalize",
    "TRITONBACKEND_ModelInitialize",
    "TRITONBACKEND_ModelInstanceExecute",
    "TRITONBACKEND_ModelInstanceFinalize",
    "TRITONBACKEND_ModelInstanceInitialize",
    "TRITONBACKEND_ModelInstanceReady",
}


def library():
    return pathlib.Path(os.environ["TRITON_BACKENDS"]) / "inflight/libtriton_inflight.so"


def readelf(option, file):
    command = ["readelf", option, "--wide", file]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def dynamic_symbols(file):
    """The names that a file exports, and those that it imports."""
    exports, imports = set(), set()
    for line in readelf("--dyn-syms", file):
        # Number, value, size, type, binding, visibility, section, name.
        fields = line.split()
        if len(fields) >= 8 and fields[4] in ("GLOBAL", "WEAK", "UNIQUE"):
            name = fields[7].partition("@")[0]
            (imports if fields[6] == "UND" else exports).add(name)
    return exports, imports


def dynamic_entries(file, *kinds):
    """The entries of a file for the dynamic linker: libraries that it needs, or folders where these are looked for."""
    lines = readelf("--dynamic", file)
    return [found[1] for line in lines if (found := re.search(rf"\((?:{'|'.join(kinds)})\).*\[(.*)\]", line))]


def imported_from_triton():
    return {name for name in dynamic_symbols(library())[1] if name.startswith("TRITON")}


def server_exports(server):
    """What a server and its own libraries export, found by the server's run path."""
    exports = dynamic_symbols(server)[0]
    needed = [name for name in dynamic_entries(server, "NEEDED") if name.startswith("libtritonserver")]
    for path in dynamic_entries(server, "RPATH", "RUNPATH"):
        for folder in path.replace("$ORIGIN", str(server.parent)).split(":"):
            for file in (pathlib.Path(folder) / name for name in needed):
                if file.is_file():
                    exports |= dynamic_symbols(file)[0]
    return exports


def test_the_library_exports_its_entry_points_and_nothing_else():
    exports, _ = dynamic_symbols(library())
    if platform.machine() != "x86_64":
        # They cannot be hidden there: see crates/backend/build.rs.
        exports = {name for name in exports if not name.startswith("llg_")}
    assert exports == ENTRY_POINTS


def test_the_oldest_supported_server_has_every_function_that_the_library_imports():
    lines = OLDEST_SERVER.read_text().splitlines()
    imports = imported_from_triton()
    assert len(imports) > 50
    assert imports - {line for line in lines if not line.startswith("#")} == set()


def test_the_server_at_hand_has_every_function_that_the_library_imports():
    assert imported_from_triton() - server_exports(pathlib.Path(os.environ["TRITONSERVER"]).resolve()) == set()


def test_the_library_needs_nothing_but_the_c_library():
    # A library of Triton's among these would be loaded a second time beside the server's own: in some distributions its
    # file has another name.
    system = ("libc.", "libm.", "libgcc_s.", "ld-linux", "libpthread.", "libdl.", "librt.")
    needed = dynamic_entries(library(), "NEEDED")
    assert needed and [name for name in needed if not name.startswith(system)] == []
