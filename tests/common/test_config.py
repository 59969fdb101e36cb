from __future__ import annotations

import pytest

from kvferry.common.config import SECTION_OF, Config, load_config
from kvferry.common.errors import ConfigError


def write(path, text):
    path.write_text(text)
    return str(path)


def test_without_anything_the_defaults_hold():
    assert load_config(environ={}) == Config()


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path):
    file = write(tmp_path / "c.toml", "[engine]\nblock_size = 32\nmax-num-seqs = 3\nmax_model_len = 100\n")
    environ = {"KVFERRY_ENGINE__MAX_NUM_SEQS": "4", "KVFERRY_ENGINE__MAX_MODEL_LEN": "200"}
    config = load_config({"max_model_len": "300"}, file=file, environ=environ)
    assert (config.engine.block_size, config.engine.max_num_seqs, config.engine.max_model_len) == (32, 4, 300)


def test_the_file_may_be_named_by_the_environment_and_be_yaml(tmp_path):
    file = write(tmp_path / "c.yaml", "cluster:\n  model: m\nnode:\n  transports: [grpc]\n")
    config = load_config(environ={"KVFERRY_CONFIG": file})
    assert config.cluster.model == "m"
    assert config.node.transports == ("grpc",)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1000", 1000), ("512MiB", 2**29), ("512M", 2**29), ("0.5 GiB", 2**29), ("2gb", 2**31), ("64k", 2**16), (7, 7)],
)
def test_sizes_are_read_in_powers_of_1024(text, num_bytes):
    assert load_config({"kv_cache_memory": text}, environ={}).engine.kv_cache_memory == num_bytes


@pytest.mark.parametrize("text", ["true", "1", "yes"])
def test_switches_are_read_from_text(text):
    environ = {"KVFERRY_ENGINE__ENABLE_PREFIX_CACHING": text}
    assert load_config({"enable_prefix_caching": "false"}, environ=environ).engine.enable_prefix_caching is False
    assert load_config(environ=environ).engine.enable_prefix_caching is True


def test_lists_are_read_from_text_with_commas():
    assert load_config({"transports": "grpc, shm"}, environ={}).node.transports == ("grpc", "shm")


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        ({"max_num_seq": 1}, {}, "unknown option 'max_num_seq' (did you mean 'max_num_seqs'?)"),
        ({}, {"KVFERRY_ENGIN__BLOCK_SIZE": "1"}, "unknown section 'engin' (did you mean 'engine'?)"),
        ({}, {"KVFERRY_ENGINE__BLOK_SIZE": "1"}, "unknown option engine.blok_size (did you mean 'block_size'?)"),
        ({"block_size": "0"}, {}, "engine.block_size = '0'"),
        ({"port": "http"}, {}, "gateway.port = 'http'"),
        ({"transports": "telepathy"}, {}, "node.transports"),
        ({"log_level": "loud"}, {}, "cluster.log_level = 'loud'"),
        ({"kv_cache_memory": "lots"}, {}, "write for example 512MiB"),
        ({}, {"KVFERRY_CONFIG": "/no/such.toml"}, "config file /no/such.toml"),
    ],
)
def test_a_mistake_is_named_with_what_would_be_accepted(flags, environ, expected):
    with pytest.raises(ConfigError) as caught:
        load_config(flags, environ=environ)
    assert expected in caught.value.message


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("c.toml", "[engine]\nblock_siz = 1", "did you mean 'block_size'"),
        ("c.toml", "[engine", "does not parse"),
        ("c.yaml", "a: [", "does not parse"),
        ("c.yaml", "just text", "expected sections"),
        ("c.toml", "block_size = 3", "expected sections"),
    ],
)
def test_a_file_that_makes_no_sense_is_named(tmp_path, name, text, expected):
    file = write(tmp_path / name, text)
    with pytest.raises(ConfigError) as caught:
        load_config(file=file, environ={})
    assert expected in caught.value.message
    assert file in caught.value.message


def test_several_mistakes_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        load_config({"block_size": "x", "port": "99999"}, environ={})
    assert "engine.block_size" in caught.value.message
    assert "gateway.port" in caught.value.message


def test_a_loaded_tree_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        Config().engine.block_size = 3


def test_the_name_in_the_api_is_the_model_unless_another_is_given():
    assert load_config({"model": "m"}, environ={}).served_model == "m"
    assert load_config({"model": "m", "served_model_name": "n"}, environ={}).served_model == "n"


def test_every_field_belongs_to_one_section():
    config = Config()
    for field, section in SECTION_OF.items():
        assert hasattr(getattr(config, section), field)
