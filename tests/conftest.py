from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.common.cores import NODE_ENVIRON

os.environ.update(NODE_ENVIRON | os.environ)  # before anything imports torch

from tests.tiny_model import TinyShape, write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a context of 2,048 tokens that loads in milliseconds."""
    shape = TinyShape(max_position_embeddings=2048)
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", shape=shape)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model, prepared as a user would; downloads once."""
    from kvferry.services.local.prepare import prepare_model

    return prepare_model("smollm2-135m")
