from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GENERATED = ("kvferry_pb2.py", "kvferry_pb2.pyi", "kvferry_pb2_grpc.py")


def test_generating_the_wire_code_again_changes_nothing(tmp_path):
    grpc_tools = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools is not installed")
    version = importlib.metadata.version("grpcio-tools")
    if f"GRPC_GENERATED_VERSION = '{version}'" not in (ROOT / "proto" / "kvferry_pb2_grpc.py").read_text():
        pytest.skip(f"the committed code was made by another grpcio-tools than {version}")
    (tmp_path / "kvferry" / "proto").mkdir(parents=True)
    shutil.copy(ROOT / "proto" / "kvferry.proto", tmp_path)
    status = grpc_tools.main(
        [
            "protoc",
            f"-Ikvferry/proto={tmp_path}",
            *(f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")),
            str(tmp_path / "kvferry.proto"),
        ]
    )
    assert status == 0
    changed = [
        name
        for name in GENERATED
        if (tmp_path / "kvferry" / "proto" / name).read_text() != (ROOT / "proto" / name).read_text()
    ]
    assert changed == [], "run `make proto`"
