"""From a Hugging Face folder to a model: safetensors checked by name and shape, then converted one by one.

Nothing is held twice: packed weights replace their originals tensor by tensor, and an embedding table that already has
the wanted dtype stays mapped from the file, so that nodes on one host share its pages.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kvferry.common.errors import ModelLoadError
from kvferry.kernels import ops
from kvferry.services.engine.model import LayerWeights, LlamaModel, ModelWeights
from kvferry.services.engine.model_config import ModelConfig

Shape = tuple[int, ...]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_model(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    batch_invariant: bool = False,
    weight_format: ops.WeightFormat = "float32",
) -> LlamaModel:
    """`dtype` is what is computed in, `weight_format` what a CPU keeps the dense layers' weights as, the head's too.

    Raises ModelLoadError that names what is wrong with the folder, its config or its tensors."""
    config = ModelConfig.from_folder(folder)
    files = Safetensors(folder)
    files.check(expected_shapes(config), optional={HEAD} if config.tied_head else set())
    device = torch.device(device)

    def read(name: str) -> torch.Tensor:
        return files.read(name).to(device, dtype)

    def own(name: str) -> torch.Tensor:
        return read(name).clone()  # small tensors: a copy lets go of the mapped file

    def linear(prefix: str, names: tuple[str, ...], has_bias: bool) -> ops.Linear:
        weight = torch.cat([read(f"{prefix}.{name}.weight") for name in names])
        bias = torch.cat([read(f"{prefix}.{name}.bias") for name in names]) if has_bias else None
        return ops.pack_linear(weight, bias, batch_invariant, weight_format)

    def layer(prefix: str) -> LayerWeights:
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return LayerWeights(
            attention_norm=own(f"{prefix}.input_layernorm.weight"),
            qkv=linear(attention, ("q_proj", "k_proj", "v_proj"), config.qkv_bias),
            q_norm=own(f"{attention}.q_norm.weight") if config.qk_norm else None,
            k_norm=own(f"{attention}.k_norm.weight") if config.qk_norm else None,
            o=linear(attention, ("o_proj",), config.o_bias),
            mlp_norm=own(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=linear(mlp, ("gate_proj", "up_proj"), config.mlp_bias),
            down=linear(mlp, ("down_proj",), config.mlp_bias),
        )

    layers = tuple(layer(f"model.layers.{i}") for i in range(config.num_layers))
    _return_freed_memory()
    embedding = read(EMBEDDING)
    is_shared = config.tied_head and device.type != "cpu"  # there it is repacked, from a mapping that then ends
    weights = ModelWeights(
        embedding=embedding,
        layers=layers,
        final_norm=own("model.norm.weight"),
        head=ops.pack_linear(
            embedding if is_shared else read(EMBEDDING if config.tied_head else HEAD),
            None,
            batch_invariant,
            weight_format,
        ),
    )
    _return_freed_memory()
    return LlamaModel(config, weights)


def _return_freed_memory() -> None:
    """Hands freed originals back to the system: glibc would keep some 10 % of the weights' size."""
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def model_fingerprint(
    folder: Path,
    dtype: torch.dtype,
    weight_format: ops.WeightFormat = "float32",
    kv_dtype: torch.dtype | None = None,
) -> str:
    """128 bits, in hex, that differ whenever two folders would compute other keys and values.

    Bound are the config as understood, the dtype, how weights and KV are kept, and of every file the header, the size
    and 64 bytes from the middle of each tensor: two fine-tunes of one model differ in nothing else, and reading all
    bytes would take minutes. `kv_dtype` is by default `dtype`.
    """
    config = ModelConfig.from_folder(folder)
    digest = hashlib.blake2b(digest_size=16, person=b"kvferry-model")
    kept = str(dtype), weight_format, str(kv_dtype or dtype)
    digest.update(json.dumps([asdict(config), *kept], sort_keys=True).encode())
    for path in Safetensors(folder).paths:
        with path.open("rb") as file:
            length = file.read(8)
            header = file.read(int.from_bytes(length, "little"))
            digest.update(length + header + path.stat().st_size.to_bytes(8, "little"))
            data = 8 + len(header)
            for name, entry in sorted(json.loads(header).items()):
                if name != "__metadata__":
                    start, stop = entry["data_offsets"]
                    file.seek(data + (start + stop) // 2)
                    digest.update(file.read(min(64, (stop - start + 1) // 2)))
    return digest.hexdigest()


def numerics_id(
    device: torch.device | str,
    dtype: torch.dtype,
    batch_invariant: bool = False,
    weight_format: ops.WeightFormat = "float32",
    kv_dtype: torch.dtype | None = None,
) -> str:
    """What a node's bits depend on besides the model; equal in every process of a machine, whatever its threads."""
    return ops.numerics_id(torch.device(device), dtype, batch_invariant, weight_format, kv_dtype)


def is_batch_invariant(device: torch.device, dtype: torch.dtype, wanted: bool = False) -> bool:
    """Whether what runs beside a request cannot change its bits, on this device in this dtype."""
    return ops.is_batch_invariant(device, dtype, wanted)


class Safetensors:
    """The tensors of a folder, found by their files' headers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.paths = _weight_files(folder)
        self._where: dict[str, Path] = {}
        self._shapes: dict[str, Shape] = {}
        for path in self.paths:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - not a mapping
                        self._where[name] = path
                        self._shapes[name] = tuple(file.get_slice(name).get_shape())
            except (SafetensorError, OSError) as exc:
                raise ModelLoadError(f"{path} is damaged or no safetensors file: {exc}") from exc

    def check(self, expected: dict[str, Shape], optional: set[str]) -> None:
        """Raises ModelLoadError that names every tensor missing, extra, or of a wrong shape."""
        found = {name: shape for name, shape in self._shapes.items() if not name.endswith("rotary_emb.inv_freq")}
        wrong = [
            f"{name} has shape {list(found[name])} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in found and found[name] != shape
        ]
        problems = {
            "missing": sorted(expected.keys() - found.keys()),
            "not known": sorted(found.keys() - expected.keys() - optional),
            "of a wrong shape": wrong,
        }
        if any(problems.values()):
            parts = [f"{what}: {_some(names)}" for what, names in problems.items() if names]
            raise ModelLoadError(f"the tensors in {self._folder} do not fit its config.json; {'; '.join(parts)}")

    def read(self, name: str) -> torch.Tensor:
        """The tensor, mapped from its file by a mapping of its own, which ends with the tensor."""
        with safe_open(self._where[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that the model needs -> its shape."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tied_head:
        shapes[HEAD] = (config.vocab_size, hidden)
    linears = {
        "self_attn.q_proj": (config.num_heads * head_dim, hidden, config.qkv_bias),
        "self_attn.k_proj": (config.num_kv_heads * head_dim, hidden, config.qkv_bias),
        "self_attn.v_proj": (config.num_kv_heads * head_dim, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, config.num_heads * head_dim, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}"
        shapes |= {f"{prefix}.{name}.weight": (width,) for name, width in norms.items()}
        for name, (out, width, has_bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (out, width)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (out,)
    return shapes


def _weight_files(folder: Path) -> list[Path]:
    """The files that the index names, else the only one there is."""
    index = folder / "model.safetensors.index.json"
    present = sorted(folder.glob("*.safetensors"))
    if index.exists():
        try:
            names = sorted({str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as exc:
            raise ModelLoadError(f"{index} does not parse: {exc!r}") from exc
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ModelLoadError(f"{folder} lacks files that its index names: {', '.join(missing)}")
        return [folder / name for name in names]
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    if len(present) == 1:
        return present
    if present:
        raise ModelLoadError(f"{folder} has {len(present)} safetensors files but no {index.name} that names them")
    others = [path.name for path in sorted(folder.iterdir()) if path.suffix in (".bin", ".pt", ".pth", ".gguf")]
    hint = f" (found {', '.join(others)}: convert them to safetensors)" if others else ""
    raise ModelLoadError(f"{folder} has no *.safetensors file{hint}")


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
