"""`cargo xtask package`: the same bytes from the same programs, and what is packed runs where it is unpacked."""

import gzip
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import tarfile

import pytest

from harness.clients import generate
from harness.front import Front
from harness.repository import ROOT, STORIES, add_model, add_synthetic
from harness.server import Server

pytestmark = pytest.mark.shipped

NAME = "triton-inflight"
PLUGIN = "libinflight_mpi.so"
DATE = 1700000000


def pack(programs, out, **environment):
    command = [os.environ["XTASK"], "package", f"--programs={programs}", f"--out={out}"]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(DATE), **environment}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def has_mpi():
    return (pathlib.Path(os.environ["TRITON_BACKENDS"]) / "inflight" / PLUGIN).exists()


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A folder with the programs that are packed, as they have been built for other tests."""
    folder = tmp_path_factory.mktemp("programs")
    backend = pathlib.Path(os.environ["TRITON_BACKENDS"]) / "inflight"
    of_backend = [backend / "libtriton_inflight.so", backend / "inflight-rank"]
    for path in of_backend + [pathlib.Path(os.environ[name]) for name in ("INFLIGHT_SIM", "INFLIGHT_OPENAI", "INFLIGHT_EMBED")]:
        (folder / path.name).symlink_to(path)
    if has_mpi():
        (folder / PLUGIN).symlink_to(backend / PLUGIN)
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


@pytest.fixture(scope="module")
def root(packages, tmp_path_factory):
    """An empty root with the files of the Debian package."""
    folder = tmp_path_factory.mktemp("root")
    subprocess.run(["dpkg-deb", "--extract", debian_package(packages), folder], check=True)
    return folder


def debian_package(packages):
    (path,) = packages.glob("*.deb")
    return path


def fields(packages):
    """The fields of the package's control file."""
    command = ["dpkg-deb", "--field", debian_package(packages)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return dict(line.split(": ", 1) for line in lines if not line.startswith(" "))


def imported_versions(program, start):
    """The versions of symbols that a program imports, as binutils read them."""
    command = ["readelf", "--version-info", "--wide", program]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {tuple(map(int, version.split("."))) for version in re.findall(rf"Name: {start}_([0-9.]+)", lines)}


def test_the_same_programs_give_the_same_bytes_elsewhere(programs, packages, tmp_path):
    done = pack(programs, tmp_path / "out", TZ="Asia/Tokyo", LC_ALL="C")
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
    rank.write_bytes((programs / rank.name).read_bytes() + f"{ROOT}/src/lib.rs\0".encode())
    refused = pack(folder, tmp_path / "out")
    assert refused.returncode != 0
    assert f"inflight-rank contains the path {ROOT}/src/lib.rs" in refused.stderr


def test_the_bill_of_materials_has_every_crate_and_how_it_gets_into_the_package(packages, prefix):
    (path,) = packages.glob("*.spdx.json")
    assert path.read_bytes() == (prefix / "share/doc/triton-inflight/sbom.spdx.json").read_bytes()
    bill = json.loads(path.read_text())
    assert bill["creationInfo"]["created"] == "2023-11-14T22:13:20Z"
    found = {package["SPDXID"]: package for package in bill["packages"]}
    assert len(found) == len(bill["packages"])
    names = {package["name"] for package in found.values()}
    assert {"triton-inflight", "inflight-rank", "inflight-openai", "inflight-simulator", "tokenizers", "rust-std"} <= names
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


def test_the_licence_of_every_crate_is_packed(packages, prefix):
    (path,) = packages.glob("*.spdx.json")
    licences = (prefix / "share/doc/triton-inflight/licences-of-crates.txt").read_text()
    crates = [package for package in json.loads(path.read_text())["packages"] if "checksums" in package]
    assert len(crates) > 50
    for crate in crates:
        assert f"\n{crate['name']} {crate['versionInfo']}: {crate['licenseDeclared']}\n" in licences
    assert "Permission is hereby granted, free of charge" in licences


def test_the_package_depends_on_the_versions_whose_symbols_the_programs_use(packages, programs):
    depends = dict(re.fullmatch(r"(.*) \(>= (.*)\)", entry).groups() for entry in fields(packages)["Depends"].split(", "))
    of_package = {"libc6": "GLIBC", "libgcc-s1": "GCC"}
    assert depends.keys() == of_package.keys()
    for package, start in of_package.items():
        linked = [program for program in programs.iterdir() if program.suffix != ".a"]
        highest = max(version for program in linked for version in imported_versions(program, start))
        assert depends[package] == ".".join(map(str, highest))
    # That of Ubuntu 22.04, which the container of the oldest supported server is made from.
    assert tuple(map(int, depends["libc6"].split("."))) <= (2, 35)


def test_the_package_is_installed_verified_and_removed_in_an_empty_root(packages, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can install a package")
    database = tmp_path / "var/lib/dpkg"
    for folder in ("info", "updates", "triggers"):
        (database / folder).mkdir(parents=True)
    (database / "status").touch()

    def dpkg(*arguments):
        command = ["dpkg", f"--root={tmp_path}", "--log=/dev/null", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    # The root has nothing that a package can depend on.
    done = dpkg("--force-depends", "--install", debian_package(packages))
    assert done.returncode == 0, done.stderr
    listed = [tmp_path / name[1:] for name in dpkg("--listfiles", NAME).stdout.splitlines()]
    files = {str(path.relative_to(tmp_path)) for path in listed if path.is_symlink() or path.is_file()}
    assert files == {
        "opt/tritonserver/backends/inflight/batchstrategy.so",
        "opt/tritonserver/backends/inflight/inflight-rank",
        "opt/tritonserver/backends/inflight/libtriton_inflight.so",
        "usr/bin/inflight-openai",
        "usr/bin/inflight-rank",
        "usr/bin/inflight-sim",
        "usr/include/inflight_batch_manager.h",
        "usr/include/inflight_logits_processor.h",
        "usr/lib/libinflight_embed.a",
        "usr/lib/systemd/system/inflight-openai.service",
        "usr/share/doc/triton-inflight/changelog.gz",
        "usr/share/doc/triton-inflight/copyright",
        "usr/share/doc/triton-inflight/licences-of-crates.txt.gz",
        "usr/share/doc/triton-inflight/sbom.spdx.json.gz",
        "usr/share/man/man1/inflight-openai.1.gz",
        "usr/share/man/man1/inflight-rank.1.gz",
        "usr/share/man/man1/inflight-sim.1.gz",
    } | ({f"opt/tritonserver/backends/inflight/{PLUGIN}"} if has_mpi() else set())
    num_bytes = sum((tmp_path / name).stat().st_size for name in files if not (tmp_path / name).is_symlink())
    assert int(fields(packages)["Installed-Size"]) == -(-num_bytes // 1024)
    assert dpkg("--verify", NAME).stdout == ""
    header = tmp_path / "usr/include/inflight_logits_processor.h"
    header.write_text("changed")
    assert f"/{header.relative_to(tmp_path)}" in dpkg("--verify", NAME).stdout
    done = dpkg("--purge", NAME)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"var"}


def test_what_is_not_there_is_named_and_not_packed(programs, tmp_path):
    folder = tmp_path / "programs"
    folder.mkdir()
    for path in programs.iterdir():
        if path.suffix != ".a" and path.name != PLUGIN:
            # The smallest of them, as it takes a while to compress all.
            (folder / path.name).symlink_to(programs / "inflight-rank")
    done = pack(folder, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    for name in ("libinflight_embed.a", PLUGIN):
        assert f"{name} is not packed: {folder} has none" in done.stderr
    assert "Suggests" not in fields(tmp_path / "out")
    command = ["dpkg-deb", "--contents", debian_package(tmp_path / "out")]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "libtriton_inflight.so" in listing
    assert "inflight_batch_manager.h" not in listing and PLUGIN not in listing
    (bill,) = (tmp_path / "out").glob("*.spdx.json")
    names = {package["name"] for package in json.loads(bill.read_text())["packages"]}
    assert not names & {"inflight-embed", "inflight-mpi", "mpi-sys"}


def test_the_unpacked_plug_in_joins_the_ranks_of_mpirun(packages, root, repository):
    if not has_mpi():
        pytest.skip("no plug-in for MPI")
    # That of the MPI that this machine has.
    assert fields(packages)["Suggests"] in ("openmpi-bin", "mpich")
    (bill,) = packages.glob("*.spdx.json")
    names = {package["name"] for package in json.loads(bill.read_text())["packages"]}
    assert {"inflight-mpi", "mpi-sys"} <= names
    add_model(
        repository,
        "stories",
        {"tensor_parallel_size": 2, "num_threads": 1, "rank_transport": "mpi"},
        checkpoint=STORIES,
    )
    backends = root / "opt/tritonserver/backends"
    with Server(repository, backends=backends, mpi_ranks=2) as server:
        maps = pathlib.Path(f"/proc/{server.pid}/maps").read_text()
        assert str(backends / "inflight" / PLUGIN) in maps
        assert generate(server, "stories", "Once upon a time", max_tokens=8).text.startswith("Once upon a time")


def test_an_application_is_built_with_the_unpacked_header_and_library(root, tmp_path):
    program = tmp_path / "embed"
    include, library = root / "usr/include", root / "usr/lib/libinflight_embed.a"
    source = ROOT / "examples/embed_c/embed.c"
    command = ["cc", "-std=c11", "-I", include, source, library, "-Wl,--gc-sections", "-lpthread", "-ldl", "-lm", "-o", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = run(program, json.dumps({"gpt_model_path": str(STORIES)}), "4", "5 6 7")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), done.stderr


def test_the_changes_of_the_version_are_packed(packages, root):
    changes = gzip.decompress((root / f"usr/share/doc/{NAME}/changelog.gz").read_bytes()).decode()
    assert re.search(rf"^## {re.escape(fields(packages)['Version'])}( |$)", changes, re.MULTILINE)


def test_the_dockerfile_finds_the_package_in_its_context(packages):
    text = (ROOT / "examples/docker/Dockerfile").read_text()
    (pattern,) = re.findall(r"dpkg --install /packages/(\S+)", text)
    assert list(packages.glob(pattern)) == [debian_package(packages)]
    assert "--mount=type=bind,target=/packages " in text


@pytest.mark.parametrize("kind", ["archive", "package"])
def test_the_unpacked_backend_serves_with_its_own_rank_program(kind, prefix, root, repository):
    backends = {"archive": prefix / "backends", "package": root / "opt/tritonserver/backends"}[kind]
    add_model(repository, "stories", {"tensor_parallel_size": 2, "num_threads": 1}, checkpoint=STORIES)
    with Server(repository, backends=backends) as server:
        (rank,) = server.children("inflight-rank")
        assert pathlib.Path(f"/proc/{rank}/exe").readlink() == backends / "inflight/inflight-rank"
        assert generate(server, "stories", "Once upon a time", max_tokens=8).text.startswith("Once upon a time")


def test_the_unpacked_simulator_runs(root, repository):
    add_synthetic(repository, "synthetic")
    config = repository / "synthetic" / "config.pbtxt"
    done = run(root / "usr/bin/inflight-sim", f"--config={config}", "--concurrency=2", "--num-requests=20", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["load"] == "2 clients"


def test_the_unpacked_front_answers(root, repository, monkeypatch):
    add_model(repository, "stories", checkpoint=STORIES)
    monkeypatch.setenv("INFLIGHT_OPENAI", str(root / "usr/bin/inflight-openai"))
    with Server(repository, backends=root / "opt/tritonserver/backends") as server, Front(server) as front:
        answer = front.post("/v1/completions", model="stories", prompt="Once upon a time", max_tokens=8)
        assert answer["usage"]["completion_tokens"] == 8


def test_the_service_starts_a_program_of_the_package(root):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd to read the service")
    unit = root / "usr/lib/systemd/system/inflight-openai.service"
    # A program is looked for on this machine, where none of the package is.
    copy = unit.with_name("copy.service")
    copy.write_text(unit.read_text().replace("ExecStart=/", f"ExecStart={root}/"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True)
    copy.unlink()
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_unpacked_rank_program_says_what_it_is(root):
    program = root / "usr/bin/inflight-rank"
    for option, beginning in (("--help", "Another rank of a model"), ("--version", "inflight-rank 0.")):
        done = run(program, option)
        assert (done.returncode, done.stdout[: len(beginning)]) == (0, beginning), done.stderr
    # Its library is opened: only then it knows that no server has started it.
    alone = run(program)
    assert alone.returncode == 2 and "this program is started by Triton's backend" in alone.stderr
    refused = run(program, "--mpl")
    assert refused.returncode == 2 and "--mpl is no option" in refused.stderr


def test_the_manual_pages_have_no_errors(root):
    if shutil.which("groff") is None:
        pytest.skip("no groff to read the manual pages")
    pages = sorted((root / "usr/share/man/man1").iterdir())
    assert len(pages) == 3
    for page in pages:
        text = gzip.decompress(page.read_bytes())
        done = subprocess.run(["groff", "-man", "-ww", "-b", "-Tascii", "-P-cbou"], input=text, capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"")
        name = page.name.removesuffix(".1.gz").encode()
        assert name in done.stdout and b"EXAMPLES" in done.stdout


def run(program, *arguments):
    """Runs a program of the package with none of the environment that the tests have."""
    return subprocess.run([program, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, env={})
