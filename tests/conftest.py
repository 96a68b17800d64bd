"""Shared fixtures: one tiny target a session, and a cache folder that is not the user's."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tiny import save_tiny_target, tiny_model

# Beside other workers a test and what it starts have one thread: threads that spin for work take the others' cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
else:
    torch.set_num_threads(min(2, torch.get_num_threads()))
# A busy machine is no failure: nothing here is judged by the clock.
settings.register_profile("eyas", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("eyas")


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of an 8-layer Llama with a byte-level ChatML tokenizer."""
    return save_tiny_target(tmp_path_factory.mktemp("targets") / "tiny")


@pytest.fixture(scope="session")
def sharp_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target sure of its tokens: a random one's best two are so near that a learned loss leaves ties."""
    folder = save_tiny_target(tmp_path_factory.mktemp("targets") / "sharp")
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    model.save_pretrained(folder)
    return folder
