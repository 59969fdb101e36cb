"""Loading: sharded or not, tied or not; whatever does not fit is named; memory is not held twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvferry.common.errors import ModelLoadError
from kvferry.kernels.ops import TorchLinear
from kvferry.services.engine.loader import load_model, model_fingerprint, numerics_id
from tests.engine.paging import PagedModel
from tests.tiny_model import TinyShape, write_tiny_model, write_weights

TOKENS = [5, 9, 300, 7]


def logits(folder: Path) -> torch.Tensor:
    return PagedModel(load_model(folder, torch.float32)).prefill(TOKENS, 4)[1]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    one = write_tiny_model(tmp_path / "one")
    three = write_tiny_model(tmp_path / "three", num_shards=3)
    assert len(list(three.glob("*.safetensors"))) == 3
    assert torch.equal(logits(one), logits(three))


def test_a_tied_model_may_hold_its_head_as_well(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    expected, weights = logits(folder), weights_of(folder)
    write_weights(folder, weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    assert torch.equal(logits(folder), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_and_the_embedding_are_one_tensor_where_nothing_is_repacked(tied: bool, tmp_path: Path) -> None:
    """As on a GPU; "meta" is a device without memory."""
    model = load_model(write_tiny_model(tmp_path, tied=tied), torch.bfloat16, "meta", weight_format="bfloat16")
    assert isinstance(model.weights.head, TorchLinear)
    assert (model.weights.head._weight is model.weights.embedding) == tied
    assert model.weights.head._weight.dtype == model.dtype == torch.bfloat16


def test_weights_that_only_a_cpu_can_keep_are_refused_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"torch\.bfloat16 weights become int8 on a CPU only, not on meta"):
        load_model(write_tiny_model(tmp_path), torch.bfloat16, "meta", weight_format="int8")


def test_inverse_frequencies_of_old_exports_are_ignored(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    write_weights(folder, weights_of(folder) | {name: torch.zeros(8)})
    load_model(folder, torch.float32)


def test_missing_extra_and_misshapen_tensors_are_named_together(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    weights = weights_of(folder)
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(100, 48)
    weights["model.norm.weight"] = torch.zeros(47)
    write_weights(folder, weights)
    with pytest.raises(ModelLoadError) as error:
        load_model(folder, torch.float32)
    assert "missing: model.layers.1.mlp.up_proj.weight" in error.value.message
    assert "not known: model.layers.2.mlp.up_proj.weight" in error.value.message
    assert "model.norm.weight has shape [47] instead of [48]" in error.value.message


def test_an_untied_model_without_head_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, config={"tie_word_embeddings": False})
    weights = weights_of(folder)
    weights.pop("lm_head.weight")
    write_weights(folder, weights)
    with pytest.raises(ModelLoadError, match=r"missing: lm_head\.weight"):
        load_model(folder, torch.float32)


def test_many_problems_are_counted_not_listed(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, config={"num_hidden_layers": 2})
    write_weights(folder, {"model.norm.weight": torch.zeros(48)})
    with pytest.raises(ModelLoadError, match="and 11 more"):
        load_model(folder, torch.float32)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"its index names: model-00002-of-00003\.safetensors"):
        load_model(folder, torch.float32)


def test_shards_without_index_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, num_shards=2)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelLoadError, match="2 safetensors files but no"):
        load_model(folder, torch.float32)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}'])
def test_an_index_that_does_not_parse_is_named(text: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, num_shards=2)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"index\.json does not parse"):
        load_model(folder, torch.float32)


def test_a_folder_without_weights_says_what_it_has(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors file \(found pytorch_model\.bin"):
        load_model(folder, torch.float32)


@pytest.mark.parametrize("size", [0, 5, 4000, -100])
def test_a_truncated_file_is_named(size: int, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is damaged"):
        load_model(folder, torch.float32)


def test_the_fingerprint_binds_what_changes_keys_and_values(tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base")
    same = write_tiny_model(tmp_path / "same")
    (same / "config.json").write_text((base / "config.json").read_text().replace('"bos_token_id": 1', '"x": 2'))
    others = [
        write_tiny_model(tmp_path / "seed", seed=1),
        write_tiny_model(tmp_path / "shape", shape=TinyShape(num_layers=3)),
        write_tiny_model(tmp_path / "theta", config={"rope_theta": 20000.0}),
        write_tiny_model(tmp_path / "dtype", dtype=torch.bfloat16),
    ]
    expected = model_fingerprint(base, torch.float32)
    assert model_fingerprint(same, torch.float32) == expected
    prints = {expected, model_fingerprint(base, torch.bfloat16)}
    prints |= {model_fingerprint(folder, torch.float32) for folder in others}
    assert len(prints) == 6
    assert all(len(text) == 32 for text in prints)


def test_one_changed_tensor_changes_the_fingerprint(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    before, weights = model_fingerprint(folder, torch.float32), weights_of(folder)
    weights["model.layers.1.self_attn.q_proj.weight"] *= 1.001
    write_weights(folder, weights)
    assert model_fingerprint(folder, torch.float32) != before


def test_fingerprint_and_numerics_id_are_the_same_in_another_process(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    code = (
        "import sys, torch; from pathlib import Path; from kvferry.services.engine import loader; "
        "torch.set_num_threads(1); print(loader.model_fingerprint(Path(sys.argv[1]), torch.float32)); "
        "print(loader.numerics_id('cpu', torch.float32))"
    )
    run = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [model_fingerprint(folder, torch.float32), numerics_id("cpu", torch.float32)]


def test_numerics_ids_of_dtypes_differ() -> None:
    assert numerics_id("cpu", torch.float32) != numerics_id("cpu", torch.bfloat16)


_MEMORY = """
import sys, torch
from pathlib import Path
from kvferry.services.engine.loader import load_model

def status() -> dict[str, int]:
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {words[0][:-1]: int(words[1]) * 1024 for words in lines if words[0] in ("RssAnon:", "RssFile:", "VmHWM:")}

load_model(Path(sys.argv[2]), torch.float32)  # libraries and self checks
before = status()
model = load_model(Path(sys.argv[1]), torch.float32)
after = status()
print(after["RssAnon"] - before["RssAnon"], after["RssFile"] - before["RssFile"], after["VmHWM"] - before["VmHWM"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_holds_no_weight_twice(tmp_path: Path) -> None:
    """Packed weights are the only private copy; the table stays in the file, and its pages unread."""
    shape = TinyShape(hidden_size=256, intermediate_size=2048, num_layers=6, vocab_size=60000)
    big, small = write_tiny_model(tmp_path / "big", shape=shape), write_tiny_model(tmp_path / "small")
    run = subprocess.run([sys.executable, "-c", _MEMORY, big, small], capture_output=True, text=True, check=True)
    anonymous, mapped, peak = map(int, run.stdout.split())
    table = 60000 * 256 * 4
    total = (big / "model.safetensors").stat().st_size  # the table in it is packed as head
    assert anonymous < total + 0.15 * table
    assert mapped < 0.3 * table
    assert peak < total + 2.3 * table  # while the head is packed: its source, mapped, and its copy
