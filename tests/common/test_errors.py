from __future__ import annotations

import http
import inspect

import grpc
import pytest

from kvferry.common import errors
from kvferry.common.errors import BY_CODE, Internal, KvferryError, from_code

ALL = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, KvferryError)]
each = pytest.mark.parametrize("cls", ALL)


@each
def test_every_error_survives_the_wire(cls):
    error = from_code(cls.code, "what happened", "field")
    assert type(error) is (KvferryError if cls in (KvferryError, Internal) else cls)
    assert (error.message, error.param, str(error)) == ("what happened", "field", "what happened")


@each
def test_every_error_has_statuses_that_exist(cls):
    assert cls.grpc_status in grpc.StatusCode.__members__
    assert cls.http_status == 499 or http.HTTPStatus(cls.http_status)


def test_no_two_errors_share_a_code_but_the_base_and_internal():
    codes = [cls.code for cls in ALL if cls is not Internal]
    assert len(set(codes)) == len(codes)
    assert set(BY_CODE) == set(codes)


def test_a_code_of_a_newer_peer_is_an_internal_error():
    assert type(from_code("melted", "m")) is Internal


@each
def test_the_clients_mistakes_are_not_retried_elsewhere(cls):
    if cls.http_status in (400, 404, 499):
        assert not cls.retryable


@each
def test_the_tree_in_the_docstring_names_every_error(cls):
    assert cls.__name__ in (errors.__doc__ or "")
