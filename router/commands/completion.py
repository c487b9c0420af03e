"""disagg-router completion: prints a script that completes commands and options in a shell.

zsh runs the script for bash by its `bashcompinit`.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.commands.cli import COMMANDS, parser
from router.commands.console import CommandParser

DESCRIPTION = """\
Prints a script that completes commands and options of disagg-router:

  eval "$(disagg-router completion bash)"      in ~/.bashrc
  eval "$(disagg-router completion zsh)"       in ~/.zshrc
"""
SCRIPT = """\
_disagg_router() {
    local word="${COMP_WORDS[COMP_CWORD]}"
    if [ "$COMP_CWORD" = 1 ] && [ "${word#-}" = "$word" ]; then
        COMPREPLY=($(compgen -W "%(commands)s" -- "$word"))
    elif [ "${word#-}" != "$word" ]; then
        COMPREPLY=($(compgen -W "%(options)s" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}
complete -o filenames -F _disagg_router disagg-router
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def main(argv: Sequence[str]) -> int:
    own = CommandParser("disagg-router completion", DESCRIPTION)
    own.add_argument("shell", choices=("bash", "zsh"))
    shell = own.parse_args(argv).shell
    words = {
        "commands": " ".join(sorted([*COMMANDS, "serve"])),
        "options": " ".join(sorted(parser().option_strings())),
    }
    print((ZSH if shell == "zsh" else "") + SCRIPT % words, end="")
    return 0
