"""llama.cpp: its own benchmarks, on a GGUF file made of the checkpoint."""

import json
import os
import shutil
import tarfile

from . import setup

BUILD_TIMEOUT_S = 7200
RUN_TIMEOUT_S = 1800
PROGRAMS = ["llama-bench", "llama-batched-bench", "llama-quantize", "llama-perplexity", "llama-server"]
BUILD_OPTIONS = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    # Parts that the programs do not need. The server's web pages would be downloaded.
    *(f"-DLLAMA_{what}=OFF" for what in ("OPENSSL", "BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "USE_PREBUILT_UI")),
]
# Our precision, llama.cpp's name for the format, and a description.
PRECISIONS = {
    "bf16": ("bf16", "bf16 weights, f16 K/V"),
    "int8": ("q8_0", "Q8_0 weights, f16 K/V"),
    "int4": ("q4_0", "Q4_0 weights, f16 K/V"),
}

# Classes whose checkpoints may have layers that make drafts.
WITH_DRAFTS = ("Qwen3Next", "Qwen3_5")


class Programs:
    """llama.cpp's programs, compiled, and its checkpoint converter."""

    def __init__(self):
        self.python = setup.environment("llama_cpp")
        stamp = setup.requirements("llama_cpp") + setup.requirements("llama_cpp_source") + " ".join(BUILD_OPTIONS)
        self.folder = setup.made("llama.cpp", stamp, lambda folder: build(self.python, folder))

    def run(self, program, *arguments, timeout=RUN_TIMEOUT_S):
        """Runs a program; returns its output."""
        return setup.run(self.folder / program, *arguments, timeout=timeout)

    def convert(self, checkpoint, file):
        """Converts a checkpoint to a bf16 GGUF file, without layers that make drafts."""
        script = setup.HERE / "programs/to_gguf.py"
        (kind,) = json.loads((checkpoint / "config.json").read_text())["architectures"]
        # The converter knows the option for these classes only.
        options = ["--no-mtp"] if kind.startswith(WITH_DRAFTS) else []
        setup.run(self.python, script, self.folder / "tree", checkpoint, "--outfile", file, "--outtype", "bf16", *options)

    def convert_adapter(self, checkpoint, adapter, file):
        """Converts an adapter as PEFT saves it to a GGUF file."""
        script = self.folder / "tree/convert_lora_to_gguf.py"
        setup.run(self.python, script, "--base", checkpoint, "--outfile", file, "--outtype", "bf16", adapter)


class LlamaCpp:
    """Lockstep batches of random tokens: no sampling, no text, no server."""

    name = "llama.cpp"

    def __init__(self, checkpoint, precision):
        self.format, self.precision = PRECISIONS[precision]
        self.programs = Programs()
        folder = setup.converted(checkpoint, "gguf", lambda folder: self.convert(checkpoint, folder))
        self.file = folder / f"{self.format}.gguf"

    def convert(self, checkpoint, folder):
        bf16 = folder / "bf16.gguf"
        self.programs.convert(checkpoint, bf16)
        for rounded in ("q8_0", "q4_0"):
            self.programs.run("llama-quantize", bf16, folder / f"{rounded}.gguf", rounded)

    def measure(self, loads):
        threads = len(os.sched_getaffinity(0))
        rates = {}
        for load in loads:
            if load.is_prompt:
                arguments = ["-m", self.file, "-p", load.input, "-n", 0, "-t", threads, "-r", 1, "-o", "jsonl"]
                (row,) = lines(self.programs.run("llama-bench", *arguments))
                rates[load] = row["avg_ts"]
            else:
                context = load.concurrency * (load.input + load.output)
                arguments = ["-m", self.file, "-c", context, "-b", 2048, "-ub", 512, "-t", threads, "-tb", threads]
                arguments += ["-npp", load.input, "-ntg", load.output, "-npl", load.concurrency]
                arguments += ["--output-format", "jsonl"]
                (row,) = lines(self.programs.run("llama-batched-bench", *arguments))
                rates[load] = row["speed_tg"]
        return rates


def lines(text):
    """The JSON objects among a program's output lines."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def build(python, folder):
    """Builds the programs; of the source tree, keeps only the converter."""
    setup.pip(python, "--upgrade", "pip")
    source = folder / "source"
    # pip would run the archive's build system to get its name, which downloads that as well.
    requirement = setup.requirements("llama_cpp_source").splitlines()[-1]
    download = ["-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--no-binary", "llama-cpp-python"]
    setup.run(python, *download, "--dest", source, requirement)
    with tarfile.open(next(source.glob("*.tar.gz"))) as archive:
        archive.extractall(source, filter="data")
    tree = next(source.glob("*/vendor/llama.cpp"))
    tools = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    setup.run("cmake", "-G", "Ninja", "-S", tree, "-B", folder / "build", *BUILD_OPTIONS, env=tools)
    targets = [word for program in PROGRAMS for word in ("--target", program)]
    setup.run("cmake", "--build", folder / "build", *targets, env=tools, timeout=BUILD_TIMEOUT_S)
    for program in PROGRAMS:
        shutil.copy(folder / "build/bin" / program, folder)
    for part in ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py", "conversion", "gguf-py"):
        copy = shutil.copytree if (tree / part).is_dir() else shutil.copy
        (folder / "tree").mkdir(exist_ok=True)
        copy(tree / part, folder / "tree" / part)
    shutil.rmtree(folder / "build")
    shutil.rmtree(source)
