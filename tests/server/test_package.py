"""`cargo xtask package`: the same bytes from the same programs, and what is packed runs where it is unpacked."""

import hashlib
import json
import os
import pathlib
import subprocess
import tarfile

import pytest

from harness.clients import generate
from harness.repository import STORIES, add_model, add_synthetic
from harness.server import Server

DATE = 1700000000


def pack(programs, out, **environment):
    command = [os.environ["XTASK"], "package", f"--programs={programs}", f"--out={out}"]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(DATE), **environment}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A folder with the programs that are packed, as they have been built for other tests."""
    folder = tmp_path_factory.mktemp("programs")
    backend = pathlib.Path(os.environ["TRITON_BACKENDS"]) / "inflight"
    for path in (backend / "libtriton_inflight.so", backend / "inflight-rank", pathlib.Path(os.environ["INFLIGHT_SIM"])):
        (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def packages(programs, tmp_path_factory):
    """The folder with the packages."""
    out = tmp_path_factory.mktemp("packages")
    done = pack(programs, out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def prefix(packages, tmp_path_factory):
    """The archive's folder, unpacked."""
    folder = tmp_path_factory.mktemp("prefix")
    (archive,) = packages.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder)
    (prefix,) = folder.iterdir()
    assert archive.name == f"{prefix.name}.tar.gz"
    return prefix


def test_the_same_programs_give_the_same_bytes_elsewhere(programs, packages, tmp_path):
    done = pack(programs, tmp_path / "out", TZ="Asia/Tokyo", LC_ALL="C", HOME=os.environ["HOME"])
    assert done.returncode == 0, done.stderr
    assert digests(tmp_path / "out") == digests(packages)


def test_checksums_are_those_of_the_files(packages):
    found = digests(packages)
    del found["SHA256SUMS"]
    lines = [line.split("  ") for line in (packages / "SHA256SUMS").read_text().splitlines()]
    assert {name: digest for digest, name in lines} == found


def test_a_program_with_a_path_of_the_machine_is_refused(programs, tmp_path):
    folder = tmp_path / "programs"
    folder.mkdir()
    for path in programs.iterdir():
        (folder / path.name).symlink_to(path)
    rank = folder / "inflight-rank"
    rank.unlink()
    checkout = pathlib.Path(os.environ["XTASK"]).parents[2]
    rank.write_bytes((programs / rank.name).read_bytes() + f"{checkout}/src/lib.rs\0".encode())
    refused = pack(folder, tmp_path / "out")
    assert refused.returncode != 0
    assert f"inflight-rank contains the path {checkout}/src/lib.rs" in refused.stderr


def test_the_bill_of_materials_has_every_crate_and_how_it_gets_into_the_package(packages, prefix):
    (path,) = packages.glob("*.spdx.json")
    assert path.read_bytes() == (prefix / "share/doc/triton-inflight/sbom.spdx.json").read_bytes()
    bill = json.loads(path.read_text())
    assert bill["creationInfo"]["created"] == "2023-11-14T22:13:20Z"
    found = {package["SPDXID"]: package for package in bill["packages"]}
    assert len(found) == len(bill["packages"])
    names = {package["name"] for package in found.values()}
    assert {"triton-inflight", "inflight-rank", "inflight-simulator", "tokenizers", "rust-std"} <= names
    for package in found.values():
        assert package["licenseDeclared"], package
        if package["downloadLocation"].startswith("https://static.crates.io/"):
            ((algorithm, digest),) = [(sum["algorithm"], sum["checksumValue"]) for sum in package["checksums"]]
            assert (algorithm, len(digest)) == ("SHA256", 64)
    needs = {}
    for relationship in bill["relationships"]:
        needs.setdefault(relationship["spdxElementId"], []).append(relationship["relatedSpdxElement"])
    reached, waiting = set(), ["SPDXRef-DOCUMENT"]
    while waiting:
        for other in needs.get(waiting.pop(), ()):
            if other not in reached:
                reached.add(other)
                waiting.append(other)
    assert reached == set(found)


def test_the_unpacked_backend_serves_with_its_own_rank_program(prefix, repository):
    add_model(repository, "stories", {"tensor_parallel_size": 2, "num_threads": 1}, checkpoint=STORIES)
    with Server(repository, backends=prefix / "backends") as server:
        (rank,) = server.children("inflight-rank")
        assert pathlib.Path(f"/proc/{rank}/exe").readlink() == prefix / "backends/inflight/inflight-rank"
        assert generate(server, "stories", "Once upon a time", max_tokens=8).text.startswith("Once upon a time")


def test_the_unpacked_simulator_runs(prefix, repository):
    add_synthetic(repository, "synthetic")
    config = repository / "synthetic" / "config.pbtxt"
    command = [prefix / "bin/inflight-sim", f"--config={config}", "--concurrency=2", "--num-requests=20", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["load"] == "2 clients"


def test_the_licence_of_every_crate_is_packed(packages, prefix):
    (path,) = packages.glob("*.spdx.json")
    licences = (prefix / "share/doc/triton-inflight/licences-of-crates.txt").read_text()
    crates = [package for package in json.loads(path.read_text())["packages"] if "checksums" in package]
    assert len(crates) > 50
    for crate in crates:
        assert f"\n{crate['name']} {crate['versionInfo']}: {crate['licenseDeclared']}\n" in licences
    assert "Permission is hereby granted, free of charge" in licences
