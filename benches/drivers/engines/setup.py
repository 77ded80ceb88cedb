"""Installs what the engines need: each a folder below target/peers, with a stamp that is written last.

The stamp names what the folder was made from; a folder without the right stamp is deleted and made again.
"""

import hashlib
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
FOLDER = HERE.parents[2] / "target" / "peers"


class Unavailable(Exception):
    """An engine cannot be installed or does not run on this machine, with the reason."""


def run(*command, timeout=None, **options):
    """Runs a program to completion; returns its output."""
    command = [str(word) for word in command]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout, **options
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"`{' '.join(command)}` did not finish within {timeout} s") from None
    except OSError as error:
        raise Unavailable(f"`{' '.join(command)}`: {error}") from None
    if done.returncode != 0:
        end = " / ".join(done.stderr.decode(errors="replace").strip().splitlines()[-3:])
        raise Unavailable(f"`{' '.join(command)}` exited with {done.returncode}: {end}")
    return done.stdout.decode(errors="replace")


def made(name, stamp, fill):
    """The folder of this name, filled unless it was made from the same stamp."""
    folder = FOLDER / name
    stamp_file = folder / "made-from"
    if stamp_file.is_file() and stamp_file.read_text() == stamp:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"installing {folder}", file=sys.stderr)
    fill(folder)
    stamp_file.write_text(stamp)
    return folder


def requirements(name):
    """The text of a requirements file in this folder."""
    return (HERE / f"{name}.txt").read_text()


def environment(name, *, with_torch=True, fill=None):
    """A Python environment with the packages of NAME.txt; returns its interpreter. All environments share one
    torch, which is large."""
    torch = environment("torch", with_torch=False) if with_torch else None
    fill = fill or (lambda python: pip(python, "--requirement", HERE / f"{name}.txt"))

    def set_up(folder):
        run(sys.executable, "-m", "venv", folder)
        if torch:
            next(folder.glob("lib/python3*/site-packages")).joinpath("torch.pth").write_text(f"{packages(torch)}\n")
        fill(folder / "bin/python")

    stamp = sys.version + requirements(name) + (requirements("torch") if with_torch else "")
    return made(name, stamp, set_up) / "bin/python"


def packages(python):
    """The folder of an environment's packages."""
    return next(pathlib.Path(python).parents[1].glob("lib/python3*/site-packages"))


def pip(python, *arguments):
    """Installs packages without caching the downloads."""
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir", *arguments)


def converted(checkpoint, name, fill):
    """An engine's conversion of a checkpoint, made once."""
    weights = sorted(pathlib.Path(checkpoint).glob("*.safetensors"))
    parts = [f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in weights]
    parts.append((pathlib.Path(checkpoint) / "config.json").read_text())
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    return made(f"models/{pathlib.Path(checkpoint).resolve().name}-{digest}-{name}", digest, fill)
