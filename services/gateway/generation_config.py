"""The model's own `generation_config.json`: what a client gets who says nothing; as vLLM's `--generation-config`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvferry.common.errors import ModelLoadError
from kvferry.services.gateway.errors import from_validation


class GenerationConfig(BaseModel):
    """None: the model says nothing. `max_new_tokens` also caps what a client may ask for, silently, as in vLLM."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, frozen=True)

    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    max_new_tokens: int | None = Field(None, ge=1, lt=2**31)

    @classmethod
    def load(cls, folder: Path) -> GenerationConfig:
        """An empty one where the folder has no such file. Raises ModelLoadError that names the file and the field."""
        path = folder / "generation_config.json"
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return cls()
        except OSError as exc:
            raise ModelLoadError(f"{path}: {exc.strerror}") from exc
        except ValidationError as exc:
            raise ModelLoadError(f"{path}: {from_validation(exc).message}; or use --generation-config vllm") from exc
