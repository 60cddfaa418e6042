"""What `make test` takes for the number of cores."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.mark.skipif(shutil.which("nproc") is None, reason="no nproc, which coreutils have")
def test_the_number_of_workers_follows_the_cores_and_not_the_threads_of_each(root: Path) -> None:
    makefile = (root / "Makefile").read_text()
    exported = re.search(r"^test: export OMP_NUM_THREADS := (\d+)$", makefile, re.MULTILINE)
    counted = re.search(r"cores=\$\$(\(.*?\))", makefile)
    assert exported and counted
    environment = {**os.environ, "OMP_NUM_THREADS": exported[1]}
    told = subprocess.run(["bash", "-c", f"echo ${counted[1]}"], env=environment, capture_output=True, text=True)
    assert int(told.stdout) == len(os.sched_getaffinity(0))
