"""The engine process, started by the C++ backend: slipstream-engine --socket PATH --token HEX.

Greets, reads the model's config, builds what its `task` needs (torch is imported for `generate` alone), serves, exits.
Exit status: 0 the backend closed the socket or a drain ended, 1 the engine failed or the load did, 2 a broken protocol.
"""

from __future__ import annotations

import argparse
import logging
import signal
from typing import Protocol

from slipstream.core.config import EngineConfig
from slipstream.core.config_checks import unused_options
from slipstream.core.config_parse import parse_config
from slipstream.core.start_up import uncollected_imports
from slipstream.engine.load_end import end_process, tell_load_failure
from slipstream.engine.process_log import configure_logging
from slipstream.engine.rank_processes import RankProcesses
from slipstream.engine.socket import EngineLink
from slipstream.protocol import wire

logger = logging.getLogger("slipstream")


class Server(Protocol):
    """A loaded server: serves until the backend ends it. `serve` returns the exit status of the process."""

    def serve(self) -> int: ...


def load(link: EngineLink, config: EngineConfig) -> Server:
    """The server of the config's task. Only generating needs torch, which takes seconds to import."""
    if config.task == "generate":
        return _load_generating(link, config)
    from slipstream.engine.tokenize_server import TokenizeServer

    return TokenizeServer(link, config)


def _load_generating(link: EngineLink, config: EngineConfig) -> Server:
    """The other ranks import torch while this process does."""
    processes = RankProcesses.ahead(config.parallel)
    try:
        with uncollected_imports():
            from slipstream.engine.placement import placed
            from slipstream.engine.server import GenerateServer
        return GenerateServer(link, placed(config), processes)
    except BaseException:
        processes.close()
        raise


def run(link: EngineLink) -> int:
    received = link.receive_config()
    try:
        config = parse_config(received)
        for told in unused_options(config):
            logger.warning("%s", told)
        server = load(link, config)
    except Exception as error:
        tell_load_failure(link, received.model_name, error)
        return 1
    return server.serve()


def main() -> None:
    parser = argparse.ArgumentParser(prog="slipstream-engine", description=__doc__.splitlines()[0])
    parser.add_argument("--socket", required=True)
    parser.add_argument("--token", required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then drains us
    configure_logging()
    try:
        status = run(EngineLink(arguments.socket, bytes.fromhex(arguments.token)))
    except wire.ProtocolError as error:
        logger.error("broken protocol: %s", error)
        status = 2
    except (BrokenPipeError, ConnectionError) as error:
        logger.error("the backend is gone: %s", error)
        status = 0
    end_process(status)


if __name__ == "__main__":
    main()
