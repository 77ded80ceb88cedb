"""unpack_chromium.py PACKAGE INTEGRITY FOLDER: unpacks the npm package @sparticuz/chromium into a folder.

The package contains a Chromium that only needs the libraries of a machine with a C compiler, the few other
libraries that it needs, and a font, each compressed with Brotli. Its own installer is JavaScript for another
environment; there are only three files to unpack.
"""

import base64
import hashlib
import io
import pathlib
import sys
import tarfile

import brotli

FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{fonts}</dir><cachedir>{cache}</cachedir></fontconfig>
"""


def main(package, integrity, folder):
    data = pathlib.Path(package).read_bytes()
    found = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
    if found != integrity:
        sys.exit(f"{package} has the checksum {found} instead of {integrity}")
    folder = pathlib.Path(folder).resolve()
    with tarfile.open(fileobj=io.BytesIO(data)) as files:

        def part(name):
            return brotli.decompress(files.extractfile(f"package/bin/{name}").read())

        program = folder / "chromium"
        program.write_bytes(part("chromium.br"))
        program.chmod(0o755)
        for name in ("al2023", "fonts"):
            with tarfile.open(fileobj=io.BytesIO(part(f"{name}.tar.br"))) as archive:
                archive.extractall(folder)
    fonts = FONTS.format(fonts=folder / "fonts", cache=folder / "font-cache")
    (folder / "fonts.conf").write_text(fonts)


if __name__ == "__main__":
    main(*sys.argv[1:])
