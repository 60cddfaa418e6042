"""`guarded` loaded outside Triton, before models that are functions."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from fake_python_backend import fake_utils
from guarded_model import OF_STUB, Open
from patience import PATIENCE_S

if TYPE_CHECKING:  # tests of encoders on a GPU need no client of Triton
    from fake_models import FakeModels


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, over a stand-in for the stub's."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_utils())
    for name in OF_STUB:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(OF_STUB[0])
    for name in OF_STUB:  # nobody else has that stub
        sys.modules.pop(name, None)


@pytest.fixture
def guard(serving: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Call it with the models' server and parameters: a loaded `guarded`."""
    monkeypatch.setattr(sys.modules["slipstream.encoders.triton_calls"], "_CONNECT_S", PATIENCE_S)
    with ExitStack() as stack:

        def opened(models: FakeModels | str, **parameters: str) -> Any:
            url = models if isinstance(models, str) else stack.enter_context(models).url
            given = {"triton_url": url, "hold_back_chars": "0", "check_every_chars": "1", **parameters}
            entries = {name: {"string_value": value} for name, value in given.items()}
            model = serving.GuardedModel()
            model.initialize({"model_config": json.dumps({"parameters": entries})})
            stack.callback(lambda: model._thread.is_alive() and model.finalize())
            return model

        yield opened
