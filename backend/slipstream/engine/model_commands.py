"""Commands to the model that come as requests: sleep, wake, reload, adapters, and the question how it is.

`start` runs on the thread that brought the request. What takes as long as a load runs on a thread of its own, one at a
time; answers may come from there.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from slipstream.core.config import EngineConfig
from slipstream.core.control import LIST_LORA, OF_LORA, STATE, Control
from slipstream.core.errors import CapacityError
from slipstream.engine.engine import Engine
from slipstream.engine.residency import allowed_folder
from slipstream.protocol.request_parser import ClientRequest


class ModelCommands:
    """answer: sends a client its one response, a text. refuse: answers a handle with an error. Both: any thread."""

    def __init__(
        self,
        engine: Engine,
        config: EngineConfig,
        answer: Callable[[ClientRequest, str], None],
        refuse: Callable[[int, Exception], None],
    ) -> None:
        self._engine, self._config, self._answer, self._refuse = engine, config, answer, refuse
        self._is_running = threading.Lock()
        self._thread: threading.Thread | None = None  # the last one

    def start(self, client: ClientRequest, control: Control) -> None:
        """Answer at once or later. Raises CapacityError while another command is under way, or without a thread."""
        if control.command == STATE:
            self._answer_state(client)
        elif control.command == LIST_LORA:
            self._answer_adapters(client)
        elif self._is_running.acquire(blocking=False):
            thread = threading.Thread(target=self._run, args=(client, control), name="control", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._is_running.release()
                raise CapacityError(f"there is no thread to carry out the command: {error}") from None
            self._thread = thread
        else:
            raise CapacityError("another command to the model is under way; try again later")

    def join(self, timeout_s: float) -> None:
        """Wait until the command under way, if there is one, has been answered."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, client: ClientRequest, control: Control) -> None:
        failure, start = None, time.monotonic()
        try:
            if control.command in OF_LORA:
                self._engine.adapters.carry_out(control)
            else:
                self._engine.post(replace(control, folder=allowed_folder(self._config, control.folder))).wait()
        except Exception as error:
            failure = error
        finally:
            self._is_running.release()  # before the answer, behind which the next command may come
        if failure is not None:
            self._refuse(client.handle, failure)
        elif control.command in OF_LORA:
            self._answer_adapters(client)
        else:
            self._answer_state(client, time.monotonic() - start)

    def _answer_state(self, client: ClientRequest, seconds: float = 0.0) -> None:
        level = self._engine.residency.level
        told = {"is_sleeping": level > 0, "sleep_level": level, "seconds": round(seconds, 3)}
        self._answer(client, json.dumps(told))

    def _answer_adapters(self, client: ClientRequest) -> None:
        self._answer(client, json.dumps({"adapters": self._engine.adapters.names}))
