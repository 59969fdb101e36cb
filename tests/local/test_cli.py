from __future__ import annotations

import subprocess
import sys

import pytest

import kvferry
from kvferry.common.config import SECTIONS, Config, load_config
from kvferry.common.errors import BadRequest, ConfigError
from kvferry.services.local import cli
from kvferry.services.local.flags import Parser, add_config_flags, config_environ, given_flags


def parse(*argv: str, sections=tuple(SECTIONS)):
    parser = Parser()
    add_config_flags(parser, sections)
    return given_flags(parser.parse_all(argv))


def test_every_field_of_the_tree_has_a_flag_with_its_default_in_the_help():
    parser = Parser()
    add_config_flags(parser, SECTIONS)
    text = parser.format_help()
    for cls in SECTIONS.values():
        for field, info in cls.model_fields.items():
            assert f"--{field.replace('_', '-')}" in text
            if info.default is not None and not isinstance(info.default, tuple | bool):
                assert f"(default: {info.default})" in " ".join(text.split()), field


def test_only_what_was_given_overrides_file_and_environment():
    assert parse() == {}
    flags = parse("--max-num-seqs", "7", "--no-enable-prefix-caching", "--prefill", "3", "--transports", "grpc,shm")
    assert flags == {
        "max_num_seqs": "7",
        "enable_prefix_caching": False,
        "num_prefill": "3",
        "transports": "grpc,shm",
    }
    config = load_config(flags, environ={"KVFERRY_ENGINE__MAX_NUM_SEQS": "9", "KVFERRY_ENGINE__BLOCK_SIZE": "32"})
    assert config.engine.max_num_seqs == 7
    assert config.engine.block_size == 32
    assert config.node.transports == ("grpc", "shm")


@pytest.mark.parametrize(("first", "second"), [("--prefill", "--num-prefill"), ("--both", "--num-both")])
def test_the_short_names_of_the_node_counts_mean_the_same(first, second):
    assert parse(first, "2") == parse(second, "2")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["up", "--max-num-seq", "3"], "unknown option --max-num-seq (did you mean '--max-num-seqs'?)"),
        (["up", "--max-num-sek=3"], "did you mean '--max-num-seqs'?"),
        (["up", "--block-size", "x"], "engine.block_size = 'x'"),
        (["up", "--block-size"], "expected one argument"),
        (["up", "--kv-cache-memory", "many"], "write for example 512MiB"),
        (["up", "surplus"], "unknown argument surplus"),
        (["gateway", "--max-num-seqs", "3"], "unknown option --max-num-seqs"),
        (["dekode"], "invalid choice: 'dekode'"),
        ([], "COMMAND"),
        (["up", "--config", "/no/such/file.toml"], "/no/such/file.toml"),
        (["model", "prepare", "no-such"], "unknown model 'no-such'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(argv, expected, capsys):
    assert cli.main(argv) == 2
    shown = capsys.readouterr().err
    assert expected in shown
    assert len(shown.splitlines()) == 1


def test_an_error_that_is_not_the_operators_has_another_status(monkeypatch, capsys):
    def fail(*_: object) -> int:
        raise BadRequest("no")

    monkeypatch.setattr(cli, "_version", fail)
    assert cli.main(["version"]) == 1
    assert capsys.readouterr().err == "kvferry: no\n"


def test_a_missing_worker_package_is_named(monkeypatch, capsys):
    def fail(*_: object) -> int:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(cli, "_decode", fail)
    assert cli.main(["decode"]) == 2
    assert capsys.readouterr().err == "kvferry: this command needs torch: install kvferry[worker]\n"


def test_version_is_printed(capsys):
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"kvferry {kvferry.__version__}\n"


def test_the_command_line_starts_without_the_heavy_packages():
    code = (
        "import sys; from kvferry.services.local import cli; cli.main(['version']);"
        "assert not {'torch', 'numpy', 'grpc', 'transformers'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_the_environment_for_children_gives_the_same_tree_whatever_ours_says():
    config = load_config(
        {
            "kv_cache_memory": "64MiB",
            "transports": "grpc",
            "enable_prefix_caching": "false",
            "redis_url": "redis://:secret@h/0",
        },
        environ={},
    )
    base = {"PATH": "/bin", "KVFERRY_ENGINE__BLOCK_SIZE": "64", "KVFERRY_CONFIG": "/x.toml", "KVFERRY_CACHE": "/c"}
    environ = config_environ(config, base)
    assert load_config(environ=environ) == config
    assert environ["PATH"] == "/bin"
    assert environ["KVFERRY_CACHE"] == "/c"
    assert config_environ(Config(), {}) == {}


def test_abbreviations_are_not_guessed():
    with pytest.raises(ConfigError, match="unknown option --max-num-w"):
        parse("--max-num-w", "3")


def test_waiting_for_a_model_ends_when_it_is_there(tmp_path):
    folder = tmp_path / "model"
    command = [sys.executable, "-m", "kvferry.services.local.cli", "model", "wait", str(folder), "--tokenizer-only"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
        try:
            assert waiting.stderr is not None
            assert "does not exist" in waiting.stderr.readline()
            folder.mkdir()
            assert "has no config.json" in waiting.stderr.readline()
            (folder / "tokenizer.json").write_text("{}")
            (folder / "config.json").write_text("{}")
            assert waiting.communicate(timeout=60)[0] == f"{folder}\n"
            assert waiting.returncode == 0
        finally:
            waiting.kill()


def test_waiting_for_a_model_that_never_comes_ends_too(tmp_path, capsys):
    assert cli.main(["model", "wait", str(tmp_path / "model"), "--timeout", "0"]) == cli.CONFIG_EXIT
    assert "does not exist" in capsys.readouterr().err
