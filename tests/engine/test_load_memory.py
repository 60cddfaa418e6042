"""What a load leaves of the device's memory: no holes between weights."""

from __future__ import annotations

import pytest
import torch
from load_holes import MIB, holes_of_a_load
from own_process import in_own_process

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_no_holes_are_left_between_weights() -> None:
    assert in_own_process(holes_of_a_load, True) < 250 * MIB
    assert in_own_process(holes_of_a_load, False) > 500 * MIB, "what segments of fixed sizes leave"


def test_a_user_s_settings_are_kept() -> None:
    assert in_own_process(holes_of_a_load, True, "expandable_segments:False") > 500 * MIB
