"""Compiles kernels/*.cu with NVRTC into one image for each file and kind of GPU, and checks their registers.

    compile.py NVRTC SOURCES OUT ARCHITECTURE...

NVRTC is the folder of the package nvidia-cuda-nvrtc-cu12, SOURCES a .cu file or a folder of them. The images are
OUT/NAME.sm_80.cubin for the architecture sm_80 and so on, and OUT/NAME.compute_90.ptx for compute_90; the architecture
sm_90=embed,rows has images of kernels/embed.cu and kernels/rows.cu only.
OUT/registers.json has the registers of each kernel. It fails if a kernel spills registers to memory, or takes more than
the head of its file allows ("at most N registers"), or if the next compilation would give another image.
"""

import concurrent.futures
import ctypes
import functools
import json
import pathlib
import re
import sys

HEADERS = pathlib.Path(__file__).parents[2] / "kernels"

FUNCTION = re.compile(r"Compiling entry function '(\w+)' for '\w+'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
# A name in an unnamed namespace: NVRTC may put the id of its process behind the file's name and hash.
PROCESS = re.compile(rb"_cu_[0-9a-f]{8}_\d+")
LIMIT = re.compile(r"at most (\d+)\s*(?://)?\s*registers")


class Nvrtc:
    """The compiler's library."""

    def __init__(self, package: pathlib.Path) -> None:
        libraries = package / "nvidia/cuda_nvrtc/lib"
        # The compiler opens this library by name, and finds it if it is already open.
        ctypes.CDLL(str(libraries / "libnvrtc-builtins.so.12.4"), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(libraries / "libnvrtc.so.12"))

    def compile(self, source: pathlib.Path, architecture: str) -> tuple[bytes, str]:
        """The image for an architecture, and the compiler's report."""
        library, program = self.library, ctypes.c_void_p()
        options = [f"--gpu-architecture={architecture}", "--std=c++17", f"-I{HEADERS}", "--ptxas-options=-v"]
        arguments = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        name = source.name.encode()
        if library.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), name, 0, None, None) != 0:
            sys.exit(f"{source}: NVRTC does not start")
        status = library.nvrtcCompileProgram(program, len(options), arguments)
        report = self._text(program, "ProgramLog")
        if status != 0:
            sys.exit(f"{source} for {architecture}:\n{report}")
        kind = "CUBIN" if architecture.startswith("sm_") else "PTX"
        image = self._bytes(program, kind)
        library.nvrtcDestroyProgram(ctypes.byref(program))
        return image, report

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        getattr(self.library, f"nvrtcGet{what}")(program, content)
        return content.raw

    def _text(self, program: ctypes.c_void_p, what: str) -> str:
        return self._bytes(program, what).rstrip(b"\0").decode()


def usage(report: str) -> dict[str, dict[str, int]]:
    """Registers, static shared memory and spilled bytes of each kernel."""
    kernels: dict[str, dict[str, int]] = {}
    kernel: dict[str, int] = {}
    for line in report.splitlines():
        if match := FUNCTION.search(line):
            kernel = kernels.setdefault(match[1], {})
        elif match := SPILLS.search(line):
            kernel["spilled_bytes"] = int(match[2]) + int(match[3])
        elif match := USED.search(line):
            kernel["registers"] = int(match[1])
            kernel["shared_bytes"] = int(match[2] or 0)
    return kernels


@functools.cache
def compiler(package: pathlib.Path) -> Nvrtc:
    """The compiler of this process."""
    return Nvrtc(package)


def compile_for(package: pathlib.Path, source: pathlib.Path, architecture: str, out: pathlib.Path) -> dict[str, dict[str, int]]:
    """Writes an image; returns the resources of its kernels."""
    image, report = compiler(package).compile(source, architecture)
    if PROCESS.search(image):
        sys.exit(f"{source} for {architecture}: names in an unnamed namespace have NVRTC's process id; give the namespace a name")
    suffix = "cubin" if architecture.startswith("sm_") else "ptx"
    (out / f"{source.stem}.{architecture}.{suffix}").write_bytes(image)
    return usage(report)


def problems_of(kernel: str, numbers: dict[str, int], limit: re.Match[str] | None) -> list[str]:
    """The problems with the registers of a kernel."""
    problems = []
    if spilled := numbers.get("spilled_bytes", 0):
        problems.append(f"{kernel} spills {spilled} bytes")
    if limit and numbers.get("registers", 0) > int(limit[1]):
        problems.append(f"{kernel} takes {numbers['registers']} registers, not {limit[1]}")
    return problems


def main() -> None:
    package, sources, out = map(pathlib.Path, sys.argv[1:4])
    architectures = sys.argv[4:]
    out.mkdir(parents=True, exist_ok=True)
    used, problems = {}, []
    with concurrent.futures.ProcessPoolExecutor() as processes:
        # Long compilations first.
        files = [sources] if sources.is_file() else sources.glob("*.cu")
        files = sorted(files, key=lambda source: -source.stat().st_size)
        pairs = [
            (source, architecture)
            for source in files
            for architecture, _, names in (argument.partition("=") for argument in architectures)
            if not names or source.stem in names.split(",")
        ]
        futures = [processes.submit(compile_for, package, *pair, out) for pair in pairs]
        for (source, architecture), future in zip(pairs, futures):
            limit = LIMIT.search(source.read_text())
            for kernel, numbers in future.result().items():
                name = f"{kernel} for {architecture}"
                used[name] = numbers
                problems += problems_of(name, numbers, limit)
    (out / "registers.json").write_text(json.dumps(used, indent=1, sort_keys=True) + "\n")
    if not used:
        sys.exit(f"{sources}: no kernels")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
