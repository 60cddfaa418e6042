"""The server's and the engines' wall clock, which a test may set (clock_shim.c)."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path


class Clock:
    """env: for the server, whose engines inherit it.  Empty without a C compiler: why_not says so."""

    def __init__(self, folder: Path) -> None:
        self._file, library = folder / "clock", folder / "clock_shim.so"
        self._file.write_bytes(struct.pack("<q", 0))
        compiler = shutil.which("gcc") or shutil.which("cc")
        self.why_not = "" if compiler else "no C compiler for the clock shim"
        self.env: dict[str, str] = {}
        if compiler:
            source = Path(__file__).with_name("clock_shim.c")
            subprocess.run([compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"], check=True)
            self.env = {"LD_PRELOAD": str(library), "CHAOS_CLOCK_FILE": str(self._file)}

    def set_offset(self, seconds: float) -> None:
        """In place: the processes have it mapped."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("<q", int(seconds * 1e9)))
