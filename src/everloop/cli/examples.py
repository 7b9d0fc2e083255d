"""The examples in the help of each command."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "everloop                              chat in your home workspace",
        "everloop .                            chat in the current folder",
        'everloop run "summarise README.md"    one goal, one answer',
    ),
    "chat": ("everloop chat ~/projects/garden", "everloop chat --session cli:work"),
    "run": (
        'everloop run "list the files here"',
        'cat report.txt | everloop run "summarise this"',
        'everloop run --continue "and in German?"',
        'everloop run --output jsonl "run the tests"',
    ),
    "init": ("everloop init ~/agent",),
    "sessions": (
        "everloop sessions",
        'everloop sessions rename cli:direct "Garden plans"',
        "everloop sessions export --format html cli:direct -o garden.html",
    ),
    "sessions show": ("everloop sessions show cli:direct",),
    "sessions rename": ('everloop sessions rename cli:direct "Garden plans"',),
    "sessions export": ("everloop sessions export cli:direct > garden.md",),
    "sessions delete": ("everloop sessions delete cli:second-try",),
    "log": ("everloop log", "everloop log --follow", "everloop log --turn 1a1d"),
    "replay": ("everloop replay 1a1d",),
    "fork": ("everloop fork cli:direct@12 --as cli:second-try",),
    "cron": ('everloop cron add "water the beans" --at "tomorrow 9:00"', "everloop cron list"),
    "cron add": (
        'everloop cron add "water the beans" --at "tomorrow 9:00"',
        'everloop cron add "check the news" --cron "0 8 * * 1-5"',
    ),
    "cron list": ("everloop cron list",),
    "cron remove": ("everloop cron remove 9b6c4fba",),
    "cron run": ("everloop cron run 9b6c4fba",),
    "serve": ("everloop serve --port 8002",),
    "link": ("everloop link --open",),
    "acp": ("everloop acp",),
    "mcp": ("everloop mcp --workspace ~/projects/garden",),
    "worker": ("everloop worker --store postgresql://db/everloop",),
    "channels": ("everloop channels", "everloop channels pair K7PXW2QD", "everloop channels resend --all"),
    "channels list": ("everloop channels list",),
    "channels status": ("everloop channels status --json",),
    "channels test": ("everloop channels test telegram",),
    "channels pair": ("everloop channels pair K7PXW2QD",),
    "channels unpair": ("everloop channels unpair telegram 123456",),
    "channels unlink": ("everloop channels unlink telegram 123456",),
    "channels trust": ("everloop channels trust matrix @anna:example.org ABCDEFGHIJ",),
    "channels dead": ("everloop channels dead",),
    "channels resend": ("everloop channels resend 17 18", "everloop channels resend --all"),
    "token": ("everloop token add phone --owner me",),
    "token add": ("everloop token add phone --owner me",),
    "token create": ("everloop token add phone --owner me",),
    "token list": ("everloop token list",),
    "token revoke": ("everloop token revoke phone",),
    "model": ("everloop model list",),
    "model list": ("everloop model list --check",),
    "model pull": ("everloop model pull qwen2.5-coder-0.5b",),
    "model path": ("everloop model path qwen2.5-coder-0.5b",),
    "model remove": ("everloop model remove qwen2.5-coder-0.5b",),
    "backup": ("everloop backup monday.db",),
    "restore": ("everloop restore monday.db",),
    "check-history": ("everloop check-history", "everloop check-history --store postgresql://db/everloop"),
    "migrate": ("everloop migrate ~/.everloop/everloop.db postgresql://db/everloop",),
    "move": ("everloop move anna postgresql://db-a/el postgresql://db-b/el --files /mnt/b",),
    "directory": ("everloop directory", "everloop directory ben postgresql://db-b/everloop"),
    "doctor": ("everloop doctor", "everloop doctor --model"),
    "completion": (
        'eval "$(everloop completion bash)"',
        "everloop completion fish > ~/.config/fish/completions/everloop.fish",
    ),
}


def epilog(path: str) -> str:
    """Return the end of a command's help."""
    shown = EXAMPLES.get(path, ())
    head = "example" if len(shown) == 1 else "examples"
    text = f"{head}:\n" + "\n".join(f"  {line}" for line in shown) if shown else ""
    return f"{text}\n\nGlobal flags, such as --model: everloop --help" if path else text
