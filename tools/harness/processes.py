"""The processes of this machine."""

import pathlib


def processes(program, belongs):
    """The ids of the processes with this program, ascending, for whose folder below /proc `belongs` is true."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if command[0].endswith(program.encode()) and belongs(folder):
                found.append(int(folder.name))
        except OSError:
            # It has ended.
            continue
    return sorted(found)
