from __future__ import annotations

import tempfile

import pytest

from kvferry.common.errors import StartupError
from kvferry.services.local import redis_server


def test_without_any_redis_server_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr(redis_server.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(StartupError, match=r"install kvferry\[local\], or give --redis-url"):
        redis_server.find_redis_server()


def test_the_socket_fits_into_an_address_however_deep_the_temporary_folder_is(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with redis_server.make_folder() as folder:
        assert len(redis_server.redis_url(redis_server.Path(folder))) < 108
