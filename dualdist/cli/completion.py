"""`dualdist completion SHELL`: print the script by which a shell completes commands, options and values on Tab."""

import argparse
from importlib.util import find_spec

from dualdist.errors import UsageError

EXAMPLES = (
    'eval "$(dualdist completion bash)"     # in ~/.bashrc',
    'eval "$(dualdist completion zsh)"      # in ~/.zshrc',
    "dualdist completion fish | source      # in ~/.config/fish/config.fish",
)
COMMON = {"shell": "the shell that the script is for"}
COMPINIT = "(( $+functions[compdef] )) || { autoload -U compinit && compinit }"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dualdist completion SHELL"
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help=COMMON["shell"])
    parser.epilog = "It needs argcomplete: pip install 'dualdist[completion]'"


def run(args: argparse.Namespace) -> int:
    if find_spec("argcomplete") is None:
        raise UsageError("completion needs argcomplete: pip install 'dualdist[completion]'")
    from argcomplete.shell_integration import shellcode

    script = shellcode(["dualdist"], shell=args.shell)
    # compdef is missing where ~/.zshrc has not called compinit; a file of $fpath has to begin with #compdef.
    print(script.replace("\n", f"\n{COMPINIT}\n", 1) if args.shell == "zsh" else script)
    return 0
