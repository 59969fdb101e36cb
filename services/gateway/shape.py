"""The base of every request body: how JSON becomes a checked, frozen object, or an error that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from kvferry.common.errors import BadRequest
from kvferry.services.gateway.errors import from_validation


class Shape(BaseModel):
    """Base of all bodies. `parse` is the way in."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True, protected_namespaces=())
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Raises BadRequest that names the first field at fault."""
        try:
            data = orjson.loads(body)
        except orjson.JSONDecodeError as exc:
            raise BadRequest(f"the body is not JSON: {exc}") from exc
        if not isinstance(data, dict):
            raise BadRequest("the body must be a JSON object")
        for name, harmless in cls.unsupported.items():
            if (value := data.get(name)) is not None and value not in harmless:
                raise BadRequest(f"{name} is not supported", param=name)
        try:
            return cls.model_validate(data)
        except ValidationError as exc:
            raise from_validation(exc) from exc

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data
