from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvferry.common.cores import NODE_ENVIRON

os.environ.update(NODE_ENVIRON | os.environ)  # before anything imports torch

import torch

if find_spec("triton") and not torch.cuda.is_available():  # what the tests that need a GPU go by
    # Triton's own functions are made for its interpreter, or for a GPU, when they are imported, and torch may import
    # them at any time. Kept from child processes.
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.experimental.gluon")  # and triton itself
    del os.environ["TRITON_INTERPRET"]

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
