from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.common.errors import ModelLoadError
from kvferry.common.models import cache_dir, resolve_model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folder_with(path: Path, *names: str) -> Path:
    path.mkdir(parents=True)
    for name in names:
        (path / name).touch()
    return path


def test_the_cache_is_where_the_environment_says():
    assert cache_dir({"KVFERRY_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/kvferry")
    assert cache_dir({}) == Path.home() / ".cache" / "kvferry"


def test_a_prepared_alias_is_its_folder_in_the_cache(cache):
    folder = folder_with(cache / "models" / "smollm2-135m", "config.json", "model.safetensors", "tokenizer.json")
    assert resolve_model("smollm2-135m") == folder


def test_an_alias_that_is_not_prepared_says_how_to():
    with pytest.raises(ModelLoadError, match="kvferry model prepare smollm2-135m"):
        resolve_model("smollm2-135m")


@pytest.mark.parametrize("weights", ["model.safetensors", "model-00001-of-00002.safetensors"])
def test_a_local_folder_is_taken_as_it_is(tmp_path, weights):
    folder = folder_with(tmp_path / "m", "config.json", weights)
    assert resolve_model(str(folder)) == folder


def test_a_gateway_needs_the_tokenizer_and_no_weights(tmp_path):
    folder = folder_with(tmp_path / "m", "config.json", "tokenizer.json")
    assert resolve_model(str(folder), weights=False) == folder
    with pytest.raises(ModelLoadError, match=r"no model.safetensors"):
        resolve_model(str(folder))


def test_a_folder_that_is_no_model_is_told_what_it_lacks(tmp_path):
    folder = folder_with(tmp_path / "m", "README.md")
    with pytest.raises(ModelLoadError, match=r"has no config.json, no model.safetensors or model.safetensors.index"):
        resolve_model(str(folder))
    with pytest.raises(ModelLoadError, match=r"has no config.json, no tokenizer.json"):
        resolve_model(str(folder), weights=False)


def test_a_file_a_missing_folder_and_a_misspelt_alias_are_told_apart(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ModelLoadError, match="is a file"):
        resolve_model(str(tmp_path / "file"))
    for missing in (str(tmp_path / "nowhere"), "./nowhere", "~/nowhere"):
        with pytest.raises(ModelLoadError, match="does not exist"):
            resolve_model(missing)
    with pytest.raises(ModelLoadError, match="did you mean 'smollm2-135m'"):
        resolve_model("smollm-135m")


def test_a_hub_id_without_a_network_is_a_clear_error(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError) as caught:
        resolve_model("nobody/kvferry-has-no-such-model")
    assert "cannot be downloaded from the hub" in caught.value.message
    assert "\n" not in caught.value.message


def test_a_hub_id_is_downloaded_without_what_is_not_needed(monkeypatch, tmp_path):
    asked = []

    def download(model: str, allow_patterns: list[str]) -> str:
        asked.append((model, allow_patterns))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    folder_with(tmp_path / "snapshot", "config.json", "tokenizer.json", "model.safetensors")
    assert resolve_model("org/name") == tmp_path / "snapshot"
    assert resolve_model("org/name", weights=False) == tmp_path / "snapshot"
    assert "*.safetensors" in asked[0][1]
    assert "*.safetensors" not in asked[1][1]
