"""The command line: its arguments, and the dispatch to a command's module.

Only argparse is loaded here; each command imports what it needs when it runs, so that `everloop --help` is instant.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import termios
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn, Protocol

from everloop._version import __version__
from everloop.errors import EverloopError

INTERRUPTED = 130  # exit status of a command that Ctrl-C ended
CLOSED_PIPE = 141  # exit status of a command whose output was closed


class Add(Protocol):
    """Adds a command: its name, the MODULE or MODULE:FUNCTION that runs it, and a description."""

    def __call__(self, name: str, runs: str, text: str, *parents: Parser, flags: Parser | None = None) -> Parser: ...


class Parser(argparse.ArgumentParser):
    """Argparse with errors of one line."""

    commands: frozenset[str] = frozenset()  # the names of the existing commands

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def format_help(self) -> str:
        """Return the help, which ends with examples."""
        from everloop.cli.examples import epilog

        self.epilog = epilog(self.prog.partition(" ")[2])
        return super().format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse, and refuse what is unknown here, where the flags of the command are known."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown[0])
        return options, unknown

    def has_flag(self, argument: str) -> bool:
        return argument == "--" or argument.partition("=")[0] in self._option_string_actions

    def takes_value(self, argument: str) -> bool:
        """Return whether the next argument is the value of this flag."""
        action = self._option_string_actions.get(argument)
        return action is not None and action.nargs != 0

    def refuse(self, argument: str) -> NoReturn:
        """End with the error that there is no such argument."""
        if not argument.startswith("-"):
            self.error(f'"{argument[:60]}" is one argument too many')
        from difflib import get_close_matches

        flag = argument.partition("=")[0]
        close = get_close_matches(flag, [*self._option_string_actions], 1, 0.7)
        self.error(f"there is no flag {flag[:60]}" + (f" (did you mean {close[0]}?)" if close else ""))

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # now, while an error can still be reported
        super().exit(status, message)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"everloop: {_single_line(message)}; `{self.prog} --help` shows what is allowed\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; an error a user can cause is one line and status 2."""
    _forgiving_output()
    _mend_terminal()
    gc.disable()  # modules loaded at start stay alive: scanning them for garbage costs a tenth of the start-up time
    try:
        known = parser()
        given = sys.argv[1:] if arguments is None else list(arguments)
        options = known.parse_args(_with_folder(given, known))
        module, _, function = options.command.partition(":")
        status: int = getattr(import_module(f"everloop.cli.{module}"), function or "command")(options)
        sys.stdout.flush()
        return status
    except EverloopError as error:
        return _complain(str(error), 2)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return _reader_left()
    except OSError as error:  # a full disk, an unreadable file: for the user to fix
        if not error.filename and _is_output_broken():
            return _complain(f"standard output cannot be written: {error.strerror or error}", 2)
        where = f": {error.filename}" if error.filename else ""
        return _complain(f"{error.strerror or error}{where}", 2)
    except Exception as error:
        if os.environ.get("EVERLOOP_DEBUG"):
            raise
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return _complain(f"unexpected error: {what}; EVERLOOP_DEBUG=1 shows where it comes from", 1)
    finally:
        gc.enable()


def _mend_terminal() -> None:
    """Take the terminal out of the raw mode that a killed chat leaves it in, where Ctrl-C stops nothing."""
    try:
        terminal = sys.stdin.fileno()
        if os.tcgetpgrp(terminal) != os.getpgrp():
            return  # started in the background: the terminal belongs to another program
        modes = termios.tcgetattr(terminal)
        if modes[3] & termios.ISIG:
            return
        modes[0] |= termios.ICRNL | termios.IXON | termios.BRKINT
        modes[1] |= termios.OPOST | termios.ONLCR
        modes[3] |= termios.ISIG | termios.ICANON | termios.ECHO | termios.ECHOE | termios.ECHOK | termios.IEXTEN
        termios.tcsetattr(terminal, termios.TCSADRAIN, modes)
    except (AttributeError, OSError, ValueError, termios.error):  # there is no terminal
        return


def _with_folder(arguments: list[str], known: Parser) -> list[str]:
    """Read `everloop [chat] FOLDER` as `everloop [chat] --workspace FOLDER`.

    Without `chat`, a folder named like a command is written ./NAME.
    """
    skip = in_chat = False
    commands = known.commands
    for place, argument in enumerate(arguments):
        if skip or argument.startswith("-"):
            if not skip and not in_chat and not known.has_flag(argument):
                known.refuse(argument)
            skip = not skip and known.takes_value(argument)
            continue
        if argument == "chat" and not in_chat:
            in_chat = True
            continue
        if argument in commands and not in_chat:
            return arguments
        if not (os.sep in argument or argument.startswith("~") or os.path.isdir(argument)):
            raise EverloopError(_no_command(argument, commands))
        if not os.path.isdir(os.path.expanduser(argument)):
            raise EverloopError(f"{argument} is not a folder: name one that exists, or make it with `everloop init`")
        if any(one.partition("=")[0] == "--workspace" for one in arguments):
            raise EverloopError(f"there are two folders: give either {argument} or --workspace")
        return [*arguments[:place], "--workspace", argument, *arguments[place + 1 :]]
    return arguments


def _no_command(word: str, commands: frozenset[str]) -> str:
    """Return what to tell a user whose first word is neither a command nor a folder."""
    from difflib import get_close_matches

    if " " in word.strip():
        return (
            f'"{word[:60]}" is not a command: `everloop run "…"` works on a goal; `everloop --help` shows the commands'
        )
    close = get_close_matches(word, sorted(commands), 1, 0.6)
    meant = f'did you mean "{close[0]}"? ' if close else ""
    return f'there is no command or folder "{word[:60]}": {meant}`everloop --help` shows the commands'


def parser() -> Parser:
    """Build the parser. Flags may stand before or after the command's name."""
    common = _flags(hidden=True)
    session = _flags_of_session()
    top = Parser(
        prog="everloop",
        description="An AI agent that never drops a turn. Without a command it opens a chat.",
        parents=[_flags(), session, _flag_of_trust()],
        allow_abbrev=False,
    )
    top.add_argument("-V", "--version", action="version", version=f"everloop {__version__}")
    top.set_defaults(command="chat")
    commands = top.add_subparsers(metavar="COMMAND", title="commands", parser_class=Parser)

    def add(name: str, runs: str, text: str, *parents: Parser, flags: Parser | None = None) -> Parser:
        described = f"{text[0].upper()}{text[1:]}."
        command = commands.add_parser(
            name, help=text, description=described, parents=[flags or common, *parents], allow_abbrev=False
        )
        command.set_defaults(command=runs)
        return command

    _add_work(add, session)
    _add_history(add, session)
    _cron_actions(add("cron", "cron", "scheduled work: add, list, remove, or run at once"), common, session)
    _add_services(add)
    _channel_actions(
        add("channels", "channels", "chat networks: their state, pairing, and undelivered messages"), common
    )
    _token_actions(add("token", "access:token", "access to the server: add, list or revoke tokens"), common)
    _model_actions(add("model", "model", "the local models: list, pull, find or remove their files"), common)
    _add_upkeep(add)
    top.commands = frozenset(commands.choices)
    return top


def _add_work(add: Add, session: Parser) -> None:
    trust = _flag_of_trust()
    chat = add("chat", "chat", "chat in the terminal, as without a command", session, trust)
    chat.add_argument("workspace", nargs="?", metavar="FOLDER", default=argparse.SUPPRESS, help="the folder to work in")
    run = add("run", "run", "work on one goal and print the answer", session, trust)
    run.add_argument(
        "goal",
        nargs="*",
        help="what to do; piped input is added to it, or is the goal if there is none; with --agent, its inputs",
    )
    run.add_argument("--agent", metavar="NAME", help="run an agent of the workspace's agents/ with KEY=VALUE inputs")
    which = run.add_mutually_exclusive_group()
    which.add_argument("-c", "--continue", dest="latest", action="store_true", help="continue the latest session")
    which.add_argument(
        "-r", "--resume", metavar="SESSION", help="continue this session: its key, or words of its title"
    )
    shape = run.add_mutually_exclusive_group()
    shape.add_argument(
        "--output",
        choices=("text", "json", "jsonl"),
        default="text",
        help="the answer (default), one JSON object, or one for each event as it happens",
    )
    shape.add_argument("--json", action="store_true", help="short for --output json")
    run.add_argument("-v", "--verbose", action="store_true", help="show tool calls on standard error")

    init = add("init", "init", "create a workspace with short starter files; nothing is overwritten")
    init.add_argument("folder", nargs="?", metavar="FOLDER", help="the folder (default: the workspace)")


def _add_history(add: Add, session: Parser) -> None:
    sessions = add("sessions", "sessions", "list the sessions, the latest first; show, rename, export or delete one")
    sessions.add_argument("-n", type=_count, default=100, metavar="N", help="show at most N (default 100)")
    sessions.add_argument(
        "--adopt", metavar="FOLDER", help="continue the sessions of FOLDER, which is gone, in the workspace"
    )
    sessions.add_argument("--json", action="store_true", help="one JSON object per line")
    _session_actions(sessions)

    log = add("log", "log", "show what happened in a session, by default the latest", session)
    log.add_argument("--turn", metavar="TURN", help="only this turn, in full; the start of its id is enough")
    log.add_argument("--all", action="store_true", help="all sessions, by time")
    log.add_argument("--follow", action="store_true", help="keep showing new events, of all sessions if none is named")
    log.add_argument("-n", type=_count, metavar="N", help="only the last N events")
    log.add_argument("--owner", metavar="OWNER", default="me", help="whose sessions (default: me)")
    log.add_argument("--json", action="store_true", help="one JSON object per line")

    replay = add("replay", "replay", "run a recorded turn again without model or tools, and compare")
    replay.add_argument("turn", metavar="TURN", help="the turn's id, or the start of it")

    fork = add("fork", "sessions:fork", "continue from an earlier point as a new session")
    fork.add_argument("source", metavar="SESSION[@N]", help="the session, and the number of its last entry to keep")
    fork.add_argument("--as", dest="new_key", metavar="KEY", help="the new session's key")


def _add_services(add: Add) -> None:
    trust = _flag_of_trust()
    serve = add("serve", "serve", "serve API clients and the web page over HTTP until stopped", trust)
    serve.add_argument("--host", metavar="HOST", help="the address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", metavar="PORT", help="the port to listen on (default 8002; 0 for any free one)")
    serve.add_argument("--open", action="store_true", help="open the web page in the browser")

    link = add("link", "access:link", "print a one-time link to the web page of the server on this machine")
    link.add_argument("--host", metavar="HOST", help="the address that the server listens on (default 127.0.0.1)")
    link.add_argument("--port", metavar="PORT", help="the port that it listens on (default 8002)")
    link.add_argument("--open", action="store_true", help="open it in the browser")

    add("acp", "stdio:acp", "run the agent for an editor that speaks the Agent Client Protocol", trust)
    add("mcp", "stdio:mcp", "run the agent as an MCP server on standard input and output", trust)

    worker = add("worker", "serve:worker", "take work from the store until stopped", trust)
    worker.add_argument("--metrics", metavar="HOST:PORT", help="serve /metrics on this address")


def _add_upkeep(add: Add) -> None:
    migrate = add("migrate", "stores:migrate", "copy a SQLite store into an empty PostgreSQL database")
    migrate.add_argument("source", metavar="FILE", help="the SQLite store")
    migrate.add_argument("target", metavar="DSN", help="the database: postgresql://USER:PASSWORD@HOST/DATABASE")

    move = add("move", "stores:move", "move one owner from a PostgreSQL database to another")
    move.add_argument("owner", metavar="OWNER", help="whose sessions, jobs, budgets and tokens")
    move.add_argument("source", metavar="FROM", help="the database that has them")
    move.add_argument("target", metavar="TO", help="the database that gets them")
    move.add_argument(
        "--files", metavar="HOME", help="copy the owner's folder, with workspace and memory, to this home"
    )

    directory = add("directory", "stores:directory", "which database each owner is in, where they are in several")
    directory.add_argument("owner", metavar="OWNER", nargs="?", help="only this one")
    directory.add_argument("store_of_owner", metavar="DSN", nargs="?", help="the database that a new owner gets")
    directory.add_argument(
        "--pool", nargs=2, metavar=("DSN", "POOL"), help="a pooler through which servers reach a database"
    )
    directory.add_argument("--no-pool", metavar="DSN", help="servers reach this database directly again")
    directory.add_argument("--json", action="store_true", help="one JSON object a line")

    backup = add("backup", "stores:back_up", "copy the SQLite store into a file, while Everloop runs")
    backup.add_argument("file", metavar="FILE", help="the backup, which must not exist yet")
    restore = add("restore", "stores:restore", "replace the store with a backup and continue from it")
    restore.add_argument("file", metavar="FILE", nargs="?", help="what `everloop backup` wrote")
    restore.add_argument(
        "--in-place", action="store_true", help="the PostgreSQL store was just restored by its own tools"
    )

    check = add("check-history", "stores:check_history", "check the whole store for broken promises")
    check.add_argument("--json", action="store_true", help="print one JSON object")

    completion = add("completion", "completion", "print a script that completes commands in your shell")
    completion.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")

    flags = _flags(hidden=True, without="--model")
    doctor = add(
        "doctor", "doctor", "check the installation: what is in use, what is missing and how to fix it", flags=flags
    )
    doctor.add_argument(
        "--model",
        dest="checked_model",
        nargs="?",
        const="",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="ask the model (by default that of the settings) ten small questions instead",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")


def _session_actions(sessions: Parser) -> None:
    actions = sessions.add_subparsers(metavar="ACTION", dest="action", parser_class=Parser)
    sessions.set_defaults(action="list")
    flags = _flags(hidden=True)

    def add(name: str, text: str) -> Parser:
        action: Parser = actions.add_parser(name, help=text, parents=[flags], allow_abbrev=False)
        action.add_argument("key", metavar="SESSION", help="its key, or words of its title")
        return action

    add("show", "show the conversation and its tool calls")
    add("rename", "give it a title").add_argument("title", metavar="TITLE", help="the title; '' removes it")
    export = add("export", "export it as a document, with secrets redacted")
    export.add_argument("--format", choices=("md", "jsonl", "html"), default="md", help="(default: md)")
    export.add_argument("-o", "--output", metavar="FILE", help="a new file (default: standard output)")
    delete = add("delete", "delete it and everything kept of it, for good")
    delete.add_argument("-y", "--yes", action="store_true", help="do not ask")


def _cron_actions(cron: Parser, common: Parser, session: Parser) -> None:
    actions = cron.add_subparsers(metavar="ACTION", dest="action", required=True, parser_class=Parser)
    cron_add = actions.add_parser("add", help="schedule a message", parents=[common, session], allow_abbrev=False)
    cron_add.add_argument("message", help="the message that the agent gets at that time")
    cron_add.add_argument("--at", metavar="TIME", help='once: 2031-05-02T18:00, "tomorrow 9:00", "in 20 minutes"')
    cron_add.add_argument("--every", metavar="SPAN", help="repeatedly: 10m, 1h30m, 2 days")
    cron_add.add_argument("--cron", metavar="FIELDS", help='by the calendar: "0 8 * * 1-5"')
    cron_add.add_argument("--tz", metavar="ZONE", help="time zone of --at and --cron (default: this machine's)")
    cron_add.add_argument(
        "--deliver",
        choices=("answer", "text"),
        default="answer",
        help="text: a reminder, sent without a model",
    )
    cron_list = actions.add_parser("list", help="list the jobs", parents=[common], allow_abbrev=False)
    cron_list.add_argument("--json", action="store_true", help="one JSON object per line")
    for action, text in (("remove", "remove a job"), ("run", "run a job now, in addition to its schedule")):
        one = actions.add_parser(action, help=text, parents=[common], allow_abbrev=False)
        one.add_argument("id", metavar="ID", help="the job's id, as `everloop cron list` shows it")


def _channel_actions(channels: Parser, common: Parser) -> None:
    actions = channels.add_subparsers(metavar="ACTION", dest="action", parser_class=Parser)
    channels.set_defaults(action="list", json=False)

    def add(name: str, text: str) -> Parser:
        action: Parser = actions.add_parser(name, help=text, parents=[common], allow_abbrev=False)
        return action

    for name, text in (("list", "list the channels of the settings"), ("status", "show the status of each channel")):
        add(name, text).add_argument("--json", action="store_true", help="one JSON object per line")
    test = add("test", "connect to a network, or send a message to a chat")
    test.add_argument("name", metavar="NAME", help="the channel")
    test.add_argument("chat", metavar="CHAT", nargs="?", help="the chat that gets a test message")
    pair = add("pair", "admit the person who has this code")
    pair.add_argument("code", metavar="CODE", help="the code that the person got")
    pair.add_argument("--admin", action="store_true", help="the person may pair others with /pair")
    for name, text in (
        ("unpair", "stop answering a person"),
        ("unlink", "end the sharing of a session that a person began with /link"),
    ):
        person = add(name, text)
        person.add_argument("name", metavar="NAME", help="the channel")
        person.add_argument("sender", metavar="SENDER", help="the person's id, as `everloop channels` shows it")
    trust = add("trust", "confirm a device of a person, for encrypted chats")
    trust.add_argument("name", metavar="NAME", help="the channel")
    trust.add_argument("user", metavar="USER", help="the person's id")
    trust.add_argument("device", metavar="DEVICE", help="as `everloop channels` shows it, with its fingerprint")
    trust.add_argument("--remove", action="store_true", help="no longer trust it")
    dead = add("dead", "list messages that could not be delivered")
    dead.add_argument("name", metavar="NAME", nargs="?", help="only of this channel")
    dead.add_argument("--json", action="store_true", help="one JSON object per line")
    resend = add("resend", "try to deliver these messages again")
    resend.add_argument("id", metavar="ID", nargs="*", type=_count, help="as `everloop channels dead` shows it")
    resend.add_argument("--all", action="store_true", help="all of them")


def _token_actions(token: Parser, common: Parser) -> None:
    actions = token.add_subparsers(metavar="ACTION", dest="action", required=True, parser_class=Parser)
    token_add = actions.add_parser(
        "add", aliases=["create"], help="create a token and print it once", parents=[common], allow_abbrev=False
    )
    token_add.add_argument("name", metavar="NAME", help="its name: who or what will use it")
    token_add.add_argument("--owner", metavar="OWNER", help="whose sessions it opens (default: the name)")
    rights = token_add.add_mutually_exclusive_group()
    rights.add_argument("--rights", metavar="RIGHTS", default="use", help="use, admin or use,admin (default: use)")
    rights.add_argument(
        "--admin", dest="rights", action="store_const", const="use,admin", help="short for --rights use,admin"
    )
    token_add.add_argument(
        "--agent",
        choices=("own", "client"),
        default="",
        help="whose tools a request without `tools` uses: with client, never the agent's own "
        "(default: the server's setting)",
    )
    token_list = actions.add_parser("list", help="list the tokens", parents=[common], allow_abbrev=False)
    token_list.add_argument("--json", action="store_true", help="one JSON object per line")
    revoke = actions.add_parser("revoke", help="revoke a token", parents=[common], allow_abbrev=False)
    revoke.add_argument("name", metavar="NAME", help="the token's name, or the start of its id")


def _model_actions(model: Parser, common: Parser) -> None:
    actions = model.add_subparsers(metavar="ACTION", dest="action", required=True, parser_class=Parser)
    model_list = actions.add_parser("list", help="list the models", parents=[common], allow_abbrev=False)
    model_list.add_argument("--check", action="store_true", help="verify every downloaded file again")
    model_list.add_argument("--json", action="store_true", help="one JSON object per line")
    for action, text in (
        ("pull", "download a model; an interrupted download is resumed"),
        ("path", "print the path of a model's file"),
        ("remove", "delete a model's file and any partial download"),
    ):
        one = actions.add_parser(action, help=text, parents=[common], allow_abbrev=False)
        one.add_argument("name", metavar="NAME", help="the model's name, or the path of your own GGUF file")


def _flags(*, hidden: bool = False, without: str = "") -> Parser:
    """Add the flags of all commands. In the help of a command they are hidden: `everloop --help` shows them once."""
    # Without defaults, so that a command does not overwrite a flag given before its name.
    flags = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    for name, value, text in (
        ("--workspace", "FOLDER", "the folder it works in"),
        ("--provider", "NAME", "which model API to use"),
        ("--base-url", "URL", "address of the model API"),
        ("--model", "NAME", "the model to use"),
        ("--store", "STORE", "the database: a file, or a postgresql:// address"),
    ):
        if name != without:
            flags.add_argument(name, metavar=value, help=argparse.SUPPRESS if hidden else text)
    return flags


def _flag_of_trust() -> Parser:
    flags = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    flags.add_argument("--trust", action="store_true", help="use the folder's own instructions, skills and agents")
    return flags


def _flags_of_session() -> Parser:
    flags = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    flags.add_argument("--session", metavar="KEY", help="the session, by its key, such as cli:work")
    return flags


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return int(text)


def _single_line(text: str) -> str:
    """Return the text on one line, without control characters."""
    return "".join(c if c.isprintable() else "�" for c in " ".join(text.split()))


def _is_output_broken() -> bool:
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _complain(message: str, status: int) -> int:
    if _is_output_broken():
        _forget_output()
    print(f"everloop: {_single_line(message)}", file=sys.stderr)
    return status


def _reader_left() -> int:
    """End quietly: the reader of the output is gone (`everloop log | head`)."""
    _forget_output()
    return CLOSED_PIPE


def _forget_output() -> None:
    # Python flushes standard output again at exit, and would report the error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _forgiving_output() -> None:
    """Make output errors printable: a character the terminal lacks becomes "?", and a closed output is ignored."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # A closed descriptor would be reused by the next file that is opened, which would then get the output.
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115 - open for as long as we run
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
            reconfigure(errors="replace")
