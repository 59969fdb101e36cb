"""The `kvferry` command. Each subcommand imports what it runs only when it runs it: `version` needs no torch."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import kvferry
from kvferry.common.config import Config, load_config
from kvferry.common.errors import KvferryError, StartupError
from kvferry.common.models import ALIASES, resolve_model
from kvferry.common.nodes import Role
from kvferry.services.local import access
from kvferry.services.local.flags import Parser, add_config_flags, given_flags
from kvferry.services.local.launch import CONFIG_EXIT

_WORKER_PACKAGES = ("torch", "numpy", "safetensors", "gguf")
_NODE_SECTIONS = ("cluster", "engine", "node")
_GATEWAY_FIELDS = ("drain_s", "peer_timeout_s")  # of the nodes' section, and the gateway's business too
MODEL_CHECK_S = 1.0
Run = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status: 2 for what the operator must change, with one line on stderr."""
    try:
        args = _parser().parse_all(sys.argv[1:] if argv is None else argv)
        run: Run = args.run
        return run(args)
    except StartupError as exc:
        print(f"kvferry: {exc.message}", file=sys.stderr)
        return CONFIG_EXIT
    except ModuleNotFoundError as exc:
        if exc.name not in _WORKER_PACKAGES:
            raise
        print(f"kvferry: this command needs {exc.name}: install kvferry[worker]", file=sys.stderr)
        return CONFIG_EXIT
    except KvferryError as exc:
        print(f"kvferry: {exc.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> Parser:
    parser = Parser(prog="kvferry", description="LLM serving with prefill and decode on separate nodes.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(
        name: str, run: Run, help_text: str, sections: Sequence[str] = (), fields: Sequence[str] = ()
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}.")
        command.set_defaults(run=run, parser=command)
        if sections:
            add_config_flags(command, sections, fields)
        return command

    add("up", _up, "run a whole cluster on this machine", ("local", "cluster", "gateway", "engine", "node"))
    add("gateway", _gateway, "run the HTTP gateway", ("cluster", "gateway"), _GATEWAY_FIELDS)
    add("prefill", _prefill, "run a prefill node", _NODE_SECTIONS)
    add("decode", _decode, "run a decode node", _NODE_SECTIONS)
    add("both", _both, "run a node that does prefill and decode", _NODE_SECTIONS)
    chat = add("chat", _chat, "talk to a cluster in this terminal")
    access.add_options(chat, (access.KEY_VARIABLE, "OPENAI_API_KEY"))
    chat.add_argument("--model", default=None, help="model (default: the first one the gateway offers)")
    chat.add_argument("--system", default=None, help="system message (default: the model's own)")
    chat.add_argument("--max-tokens", type=int, default=None, help="longest answer")
    chat.add_argument("--temperature", type=float, default=None, help="0 is greedy (default: the gateway's)")
    top = add("top", _top, "watch a cluster in this terminal")
    access.add_options(top)
    top.add_argument("--once", action="store_true", help="show the present state and end")
    explain = add("explain", _explain, "take a gateway's routing decisions again, and show what they were made of")
    explain.add_argument("what", help="a gateway's log file, - for standard input, or a request id")
    explain.add_argument("--request", default=None, help="of a file, only this request's")
    access.add_options(explain)
    _add_simulate(add("simulate", _simulate, "predict how a fleet would serve a load, to size its pools"))
    _add_tune(add("tune", _tune, "measure this machine and say what to set for production", _NODE_SECTIONS))
    model = add("model", _prepare, "manage models")
    actions = model.add_subparsers(metavar="ACTION", required=True)
    prepare = actions.add_parser("prepare", help="make a model ready to be served")
    prepare.add_argument("model", nargs="?", default="smollm2-135m", help=f"{', '.join(ALIASES)} or a hub id")
    prepare.add_argument("--force", action="store_true", help="convert again what is already there")
    prepare.set_defaults(parser=prepare)
    wait = actions.add_parser("wait", help="wait until another process has made a model ready")
    wait.add_argument("model", nargs="?", default="smollm2-135m", help=f"{', '.join(ALIASES)} or a hub id")
    wait.add_argument("--timeout", type=float, default=3600.0, help="seconds (default: %(default)s)")
    wait.add_argument("--tokenizer-only", action="store_true", help="what a gateway needs")
    wait.set_defaults(run=_wait, parser=wait)
    keys = add("api-key", _new_api_key, "manage API keys").add_subparsers(metavar="ACTION", required=True)
    new = keys.add_parser("new", help="make a key: it is printed once, and the line of it to keep")
    new.add_argument("name", help="whose it is: in logs")
    new.set_defaults(parser=new)
    add("version", _version, "print the version")
    return parser


def _add_simulate(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--nodes", default="2+2", help="fleets to compare: prefill+decode, or nodes that do both: 2+6,4+4,8")
    add("--rate", default="1.0", help="requests per second, one or several (default: %(default)s)")
    add("--requests", type=int, default=1000, help="how many (default: %(default)s)")
    add("--shape", choices=("mooncake", "hot", "burst", "chat"), default="mooncake", help="of a synthetic load")
    add("--scale", type=float, default=1.0, help="factor for the lengths of its prompts (default: %(default)s)")
    add("--trace", type=Path, default=None, help="file with a request per line, in Mooncake's form, instead")
    add("--policy", default="kvferry", help="who chooses nodes: kvferry, random, ..., several, or all")
    add("--profile", default="smollm2-cpu", help="measured step times (python -m benchmarks step_times), name or file")
    add("--speed", type=float, default=1.0, help="how many times faster than the profile the nodes are")
    add("--chunk", type=int, default=None, help="prompt tokens per step (default: the profile's)")
    add("--blocks", type=int, default=1500, help="KV blocks of 512 tokens in each node (default: %(default)s)")
    add("--bandwidth", type=float, default=2.5, help="GB/s into each node (default: %(default)s)")
    add("--pulls", action=argparse.BooleanOptionalAction, default=True, help="nodes pull cached blocks from each other")
    add("--seed", type=int, default=0, help="of the load and of all dice (default: %(default)s)")
    add("--plot", type=Path, default=None, help="write a picture of the times to the first token (SVG)")
    add("--json", type=Path, default=None, help="write the figures")


def _add_tune(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--goal", choices=("throughput", "latency"), default="latency", help="of prompt chunks (default: %(default)s)")
    add("--concurrency", type=int, default=32, help="requests at once per node (default: %(default)s)")
    add("--tokens-per-request", type=int, default=1024, help="prompt and answer together (default: %(default)s)")
    add("--prompts", type=Path, default=None, help="sample, one prompt a line (text, or JSON with `prompt`)")
    add("--write-config", type=Path, default=None, help="write what should change, for --config (TOML)")
    add("--write-kustomize", type=Path, default=None, help="write what should change, as a patch of the node pools")


def _config(args: argparse.Namespace) -> Config:
    return load_config(given_flags(args), file=args.config)


def _up(args: argparse.Namespace) -> int:
    from kvferry.services.local.up import main as up

    return up(_config(args))


def _gateway(args: argparse.Namespace) -> int:
    config = _config(args)
    if config.gateway.workers > 1 and not config.gateway.listen_fds:
        from kvferry.services.local.workers import main as workers

        return workers(config)
    from kvferry.services.gateway.app import main as gateway

    return gateway(config)


def _prefill(args: argparse.Namespace) -> int:
    from kvferry.services.prefill.service import main as prefill

    return prefill(_config(args))


def _decode(args: argparse.Namespace) -> int:
    from kvferry.services.decode.service import main as decode

    return decode(_config(args), Role.DECODE)


def _both(args: argparse.Namespace) -> int:
    from kvferry.services.decode.service import main as decode

    return decode(_config(args), Role.BOTH)


def _chat(args: argparse.Namespace) -> int:
    from kvferry.services.local.chat import main as chat

    reach = access.Access.of(args)
    return chat(reach, args.model, system=args.system, max_tokens=args.max_tokens, temperature=args.temperature)


def _top(args: argparse.Namespace) -> int:
    from kvferry.services.local.top import main as top

    return top(access.Access.of(args), once=args.once)


def _explain(args: argparse.Namespace) -> int:
    from kvferry.services.local.explain import main as explain

    return explain(args.what, request_id=args.request, access=access.Access.of(args))


def _new_api_key(args: argparse.Namespace) -> int:
    from kvferry.services.gateway.api_keys import new_key

    key, line = new_key(args.name)
    print(f"key, shown this once: {key}\nline for --api-keys-file: {line}")
    return 0


def _simulate(args: argparse.Namespace) -> int:
    from kvferry.services.local.simulate.command import main as simulate

    return simulate(args)


def _tune(args: argparse.Namespace) -> int:
    from kvferry.services.local.tune import Options
    from kvferry.services.local.tune import main as tune

    return tune(_config(args), Options.of(args))


def _prepare(args: argparse.Namespace) -> int:
    from kvferry.services.local.prepare import prepare_model

    print(prepare_model(args.model, force=args.force) if args.model in ALIASES else resolve_model(args.model))
    return 0


def _wait(args: argparse.Namespace) -> int:
    deadline = time.monotonic() + args.timeout
    said = ""
    while True:
        try:
            print(resolve_model(args.model, weights=not args.tokenizer_only))
            return 0
        except KvferryError as exc:
            if time.monotonic() > deadline:
                raise
            if exc.message != said:
                print(f"waiting: {exc.message}", file=sys.stderr, flush=True)
            said = exc.message
        time.sleep(MODEL_CHECK_S)


def _version(_: argparse.Namespace) -> int:
    print(f"kvferry {kvferry.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
