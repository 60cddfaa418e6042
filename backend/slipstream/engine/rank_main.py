"""Where the process of a rank begins: it is tied to the engine's before it imports torch, which takes seconds."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

from slipstream.core.start_up import uncollected_imports
from slipstream.engine.child_process import end_with


def main() -> NoReturn:
    """Arguments: the socket to the engine, the engine's process id, and the socket of reports."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(int(sys.argv[2]))
    with uncollected_imports():
        from slipstream.engine.rank_process import main as serve  # imports torch: only now that the kernel ends it
    serve()
