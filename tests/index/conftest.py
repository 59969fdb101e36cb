from __future__ import annotations

import pytest

from tests.index.servers import RedisServer, binaries


@pytest.fixture(scope="session", params=binaries().items(), ids=lambda item: item[0])
def redis_server(request, tmp_path_factory):
    server = RedisServer(request.param[1], tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()
