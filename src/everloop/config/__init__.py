"""The settings: defaults, overridden by EVERLOOP_HOME/config.toml, then environment variables, then flags.

The fields of `Config` are the single list of all keys. A new key is one line there; the TOML reader, the environment,
the flags and docs/config.md follow from it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from . import sources
from .keys import Key, UnderHome, key, keys_of
from .sources import DSN

DEFAULT_STORE = "everloop.db"
LINK = "link"  # the table that links the chats of one person into a shared session
RESERVED_CHANNELS = frozenset({"api", "cli", "cron", "executor", "run", "sub", "system", "web"})
Agent = Literal["own", "client"]
Busy = Literal["queue", "steer", "interrupt"]
Decision = Literal["allow", "ask", "deny"]
Sandbox = Literal["auto", "bubblewrap", "landlock", "off"]
Vision = Literal["auto", "yes", "no"]
Missed = Literal["run", "drop"]
Flush = Literal["needed", "always"]
Small = Literal["auto", "on", "off"]
Titles = Literal["model", "words"]
Taint = bool | Literal["outside"]
Span = str  # "12h", "30d"; "" for forever
Search = Literal["auto", "brave", "duckduckgo", "searxng"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of the policy, a `[[policy]]` table: the calls that it matches, and the decision on them.

    Empty fields match everything. Patterns are shell globs.
    """

    # fmt: off
    do: Decision = key("[policy]", MISSING, "what to do with a matching call", choices=get_args(Decision))
    tool: str = key("[policy]", "", "pattern: name of the tool")
    command: str = key("[policy]", "", "pattern: one simple command of a command line")
    path: str = key("[policy]", "", "pattern: a file, relative to the workspace when inside it, absolute otherwise")
    arguments: dict[str, str] = key("[policy]", {}, "pattern by argument")
    origin: str = key("[policy]", "", "pattern: `channel:chat_id` that the turn came from")
    network: bool = key(
        "[policy]", False, "`allow`: also commands with network; `ask`, `deny`: only commands that ask for it"
    )
    tainted: bool = key("[policy]", False, "an `allow` that also holds after untrusted content was read")
    why: str = key("[policy]", "", "the reason, for the model and the user")
    # fmt: on

    def problem(self) -> str:
        """Return why this rule can never take effect; "" if it can."""
        if self.command and self.tool and not fnmatchcase("exec", self.tool):
            return f'has a command, but its tool "{self.tool}" is not exec: leave one of them out'
        if self.network and self.tool and not fnmatchcase("exec", self.tool):
            return f'has network = true, but its tool "{self.tool}" is not exec: leave one of them out'
        if self.tainted and self.do != "allow":
            return f'has tainted = true, which only means something with do = "allow", not "{self.do}"'
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """An MCP server, an `[mcp.NAME]` table: a program to start, or a URL."""

    name: str
    # fmt: off
    command: str = key("mcp.NAME", "", "the program to start")
    args: tuple[str, ...] = key("mcp.NAME", (), "its arguments")
    env: dict[str, str] = key("mcp.NAME", {}, "its environment variables, besides the usual few", secret=True)
    url: str = key("mcp.NAME", "", "the address, for a server that runs elsewhere", url=True)
    headers: dict[str, str] = key("mcp.NAME", {}, "HTTP headers for it", secret=True)
    tools: tuple[str, ...] = key("mcp.NAME", ("*",), "patterns of the tools that may be used")
    trusted: bool = key("mcp.NAME", False, "trust its tool descriptions and hints, but not its results")
    timeout: float = key("mcp.NAME", 60.0, "maximum seconds of a call", above=0)
    connect_timeout: float = key("mcp.NAME", 20.0, "maximum seconds of its start", above=0)
    # fmt: on

    def problem(self) -> str:
        """Return why this server can never be reached; "" if it can."""
        if bool(self.command) == bool(self.url):
            return "needs a command (a program to start) or a url (where it runs), and not both"
        if self.url and (self.args or self.env):
            return "has args or env, which belong to a command, not to a url"
        return "has headers, which belong to a url, not to a command" if self.command and self.headers else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelConfig:
    """An account on a chat network, a `[channels.NAME]` table. Keys not listed here belong to the network."""

    collects: ClassVar[str] = "options"  # the field that receives the other keys

    name: str
    # fmt: off
    network: str = key("channels.NAME", "", "the network, if NAME is not its name: for a second account")
    owner: str = key("channels.NAME", "me", "the owner of its chats' sessions")
    allow: tuple[str, ...] = key("channels.NAME", (), "ids of people to answer; `*`: everyone, in direct chats")
    pairing: bool = key("channels.NAME", False, "a stranger who writes directly gets a code for you to confirm")
    groups: tuple[str, ...] = key("channels.NAME", (), "ids of groups in which to answer every member")
    mention: bool = key("channels.NAME", True, "in groups, answer only messages that mention it or reply to it")
    stream: bool = key("channels.NAME", True, "show answers while they are written, where messages can be edited")
    media_mb: int = key("channels.NAME", 20, "megabytes of an incoming or outgoing file; 0 for no files", at_least=0)
    per_minute: int = key("channels.NAME", 20, "messages per minute from one sender; 0 for no limit", at_least=0)
    give_up_hours: float = key("channels.NAME", 24.0, "hours until an unsent message is discarded", above=0)
    # fmt: on
    options: dict[str, Any] = field(default_factory=dict, repr=False)

    def problem(self) -> str:
        """Return why this channel can never be used; "" if it can."""
        if self.name == LINK:
            return self._link_problem()
        if self.name in RESERVED_CHANNELS:
            return "has a name that Everloop uses itself: choose another, and say which network it is with `network`"
        return "" if self.owner.strip() else "needs an owner"

    def _link_problem(self) -> str:
        """Return why `[channels.link]`, which lists people with their chats, cannot be used; "" if it can."""
        if self != ChannelConfig(name=LINK, options=self.options):
            return "names people, and has no settings of a channel"
        for person, chats in self.options.items():
            if not isinstance(chats, list) or not all(isinstance(one, str) and ":" in one for one in chats):
                return f'{person} must be a list of strings such as "telegram:123456"'
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The price of a model, a `[[price]]` table; the first match applies."""

    # fmt: off
    model: str = key("[price]", MISSING, "pattern: name of the model")
    input: float = key("[price]", 0.0, "price of a million input tokens", at_least=0)
    output: float = key("[price]", 0.0, "price of a million output tokens", at_least=0)
    cached: float = key("[price]", -1.0, "price of a million cached input tokens; by default the input price")
    # fmt: on

    def problem(self) -> str:
        """Return why this price can never apply; "" if it can."""
        return "" if self.input or self.output else "has neither an input nor an output price"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings. `Config()` has the defaults and reads no file; `Config.load()` reads the user's settings."""

    home: Path = field(default_factory=sources.default_home)
    # The workspace configured in config.toml: it belongs to the user and shares the home's store.
    home_workspace: Path = field(default=UnderHome("workspace"), repr=False, compare=False)  # type: ignore[assignment]
    # Whether `store` was set explicitly; if not, each workspace has its own.
    store_named: bool = field(default=False, repr=False, compare=False)
    links: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)  # people with their chats
    trusted: bool = field(default=True, repr=False)  # use the workspace's instructions, skills and agents

    # fmt: off
    workspace: Path = key("", UnderHome("workspace"), "the folder it works in", env="EVERLOOP_WORKSPACE", flag=True)
    store: Path | DSN = key("", UnderHome(DEFAULT_STORE), "the database", env="EVERLOOP_STORE", flag=True)
    store_pool: DSN | None = key("", None, "the same database through PgBouncer; PostgreSQL", env="EVERLOOP_STORE_POOL")
    store_directory: DSN | None = key(
        "", None, "the directory database, which maps owners to databases; PostgreSQL", env="EVERLOOP_STORE_DIRECTORY"
    )
    flush: Flush = key("", "needed", "which steps of a turn are flushed to the disk at once", choices=get_args(Flush))

    provider: str = key("provider", "", "which model API to use", key="name", env="EVERLOOP_PROVIDER", flag=True)
    base_url: str = key("provider", "", "address of the model API", env="EVERLOOP_BASE_URL", flag=True, url=True)
    api_key: str = key("provider", "", "key of the model API", env="EVERLOOP_API_KEY", secret=True)
    model: str = key("provider", "", "the model", env="EVERLOOP_MODEL", flag=True)
    window: int = key("provider", 0, "the model's window in tokens; 0 looks it up by name", at_least=0)
    vision: Vision = key("provider", "auto", "whether the model accepts pictures", choices=get_args(Vision))
    temperature: float = key("provider", -1.0, "sampling temperature; below 0 leaves it to the model")
    answer_tokens: int = key("provider", 0, "maximum tokens of an answer; 0 leaves it to the model", at_least=0)
    text_calls: bool = key("provider", True, "recognise tool calls in the model's text")
    fallbacks: tuple[str, ...] = key("provider", (), "models to try, in order, when the first one fails")
    connect_timeout: float = key("provider", 10.0, "seconds to reach the model API", above=0)
    first_token_timeout: float = key("provider", 120.0, "seconds until an answer begins", above=0)
    token_timeout: float = key("provider", 60.0, "seconds between two chunks of an answer", above=0)
    request_timeout: float = key("provider", 600.0, "seconds for a whole answer", above=0)
    retries: int = key("provider", 4, "retries after a transient failure", at_least=0)

    models: Path = key("local", UnderHome("models"), "where weights are kept", env="EVERLOOP_MODELS")
    weights: str = key("local", "", "an existing GGUF file, or a folder of them", env="EVERLOOP_WEIGHTS")
    small: Small = key("local", "auto", "help a small model: few tools, worked examples", choices=get_args(Small))
    threads: int = key("local", 0, "threads of the model; 0 for one per core", at_least=0)
    slots: int = key("local", 2, "conversations processed in parallel", at_least=1)
    mirror: str = key("local", "", "your own mirror to download weights from", url=True)

    name: str = key("agent", "Everloop", "the agent's name")
    max_iterations: int = key("agent", 20, "rounds a turn may take", at_least=1)
    titles: Titles = key(
        "agent", "model", "what names a chat: its first words, or the model when the chat is idle",
        env="EVERLOOP_TITLES", choices=get_args(Titles),
    )
    busy: Busy = key("agent", "queue", "what a message does while its session is busy", choices=get_args(Busy))
    restrict_to_workspace: bool = key("agent", True, "keep files and commands inside the workspace")
    tool_timeout: float = key("agent", 120.0, "seconds a tool call may take", above=0)
    result_limit: int = key("agent", 50_000, "characters of a result; a longer one is saved to a file", at_least=1000)
    taint: Taint = key("agent", True, "after untrusted text, ask before data is sent out; `outside` leaves files out")
    message_to: tuple[str, ...] = key("agent", (), "patterns of other chats for `message`", shape="chat")

    compact_at: float = key("context", 0.7, "share of the window at which turns are summarised", above=0, at_most=1)
    summary_model: str = key("context", "", "a different model for summaries")
    memory_limit: int = key("context", 16_000, "characters of memory/MEMORY.md", at_least=1000)
    skills_limit: int = key("context", 8_000, "characters of the list of skills", at_least=500)

    transcription_model: str = key("transcription", "", "the model that turns voice messages into text", key="model")
    transcription_url: str = key("transcription", "", "its API; by default the provider's", key="base_url", url=True)
    transcription_key: str = key("transcription", "", "its key", key="api_key", env="EVERLOOP_VOICE_KEY", secret=True)

    subagents: int = key("agent", 8, "sub-agents that may run at once", at_least=0)
    subagent_depth: int = key("agent", 2, "how deep sub-agents may nest", at_least=0)
    subagent_rounds: int = key("agent", 30, "rounds a sub-agent may take", at_least=1)
    subagent_minutes: float = key("agent", 10.0, "minutes a sub-agent may take", above=0)

    missed: Missed = key("cron", "run", "what happens to a one-shot job missed while down", choices=get_args(Missed))
    heartbeat_minutes: float = key("cron", 0.0, "minutes between checks of HEARTBEAT.md; 0 for none", at_least=0)
    heartbeat_to: str = key("cron", "cli:direct", "the chat that gets its report", shape="chat")

    sandbox: Sandbox = key("sandbox", "auto", "how commands are confined", key="mode", choices=get_args(Sandbox))
    exec_timeout: float = key("sandbox", 60.0, "seconds a command takes by default", key="timeout", above=0)
    readable: tuple[str, ...] = key("sandbox", (), "additional folders that commands may read")
    writable: tuple[str, ...] = key("sandbox", (), "additional folders that commands may write")
    environment: tuple[str, ...] = key("sandbox", (), "additional variables that commands get", shape="variable")
    memory_mb: int = key("sandbox", 4096, "memory that a command may use, in MiB", at_least=16)
    processes: int = key("sandbox", 512, "processes that a command may have at once", at_least=4)

    keep_requests: Span = key("store", "30d", "how long API requests without a session are kept")

    turn_tokens: int = key("budget", 0, "tokens a turn may use with its sub-agents; 0 for no limit", at_least=0)
    turn_cost: float = key("budget", 0.0, "cost of a turn at the configured prices; 0 for no limit", at_least=0)
    day_tokens: int = key("budget", 0, "tokens per day", at_least=0)
    day_cost: float = key("budget", 0.0, "cost per day", at_least=0)

    lease_seconds: float = key("worker", 15.0, "seconds until a silent worker is considered dead; PostgreSQL", above=0)
    worker_drain: float = key("worker", 30.0, "seconds for running steps at SIGTERM", key="drain_seconds", at_least=0)
    metrics: str = key("worker", "", "HOST:PORT where a worker serves /metrics", flag=True)

    host: str = key("server", "127.0.0.1", "the address it listens on", flag=True)
    port: int = key("server", 8002, "the port it listens on; 0 for any free one", flag=True, at_least=0)
    server_rounds: int = key("server", 5, "rounds a request may take", key="rounds", at_least=1)
    server_agent: Agent = key(
        "server", "own", "which tools a request without tools gets", key="agent", choices=get_args(Agent)
    )
    server_models: tuple[str, ...] = key("server", (), "patterns of other models a client may request", key="models")
    server_hosts: tuple[str, ...] = key("server", (), "additional host names of the server", key="hosts", shape="host")
    server_origins: tuple[str, ...] = key("server", (), "origins of web pages that may use it", key="origins")
    server_turns: bool = key("server", True, "run turns in it; otherwise workers do", key="turns", env="EVERLOOP_TURNS")
    server_tokens: bool = key("server", False, "require a token on this machine even before one exists", key="tokens")
    body_limit: int = key("server", 32_000_000, "bytes of a request", at_least=1000)
    messages_limit: int = key("server", 5000, "messages of a request", at_least=1)
    at_once: int = key("server", 2000, "concurrent requests", at_least=1)
    at_once_each: int = key("server", 1000, "concurrent requests of one token", at_least=1)
    requests_per_minute: int = key("server", 0, "requests per minute of one owner; 0 for no limit", at_least=0)
    ping_seconds: float = key("server", 15.0, "seconds between keep-alive comments of a stream", above=0)
    drain_seconds: float = key("server", 30.0, "seconds for requests to finish at shutdown", at_least=0)

    telemetry_endpoint: str = key("telemetry", "", "address for spans (OTLP over HTTP)", key="endpoint", url=True)
    telemetry_content: bool = key("telemetry", False, "include message texts in spans", key="content")

    plugin_tools: tuple[str, ...] = key("plugins", (), "tools of other packages, by their entry points", key="tools")

    search: Search = key("web", "auto", "the search engine", choices=get_args(Search))
    brave_api_key: str = key("web", "", "key of the Brave Search API", env="BRAVE_API_KEY", secret=True)
    searxng_url: str = key("web", "", "address of a SearXNG server", url=True)
    private_hosts: tuple[str, ...] = key("web", (), "private hosts that may be fetched", shape="host")
    web_timeout: float = key("web", 30.0, "seconds a page may take", key="timeout", above=0)

    policy: tuple[Rule, ...] = key("", (), "rules for tool calls", record=Rule)
    prices: tuple[Price, ...] = key("", (), "prices of models", key="price", record=Price)
    mcp: tuple[McpServer, ...] = key("", (), "MCP servers", record=McpServer)
    channels: tuple[ChannelConfig, ...] = key("", (), "accounts on chat networks", record=ChannelConfig)
    # fmt: on

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, UnderHome):
                object.__setattr__(self, item.name, self.home / value.name)
        for one in self.channels:
            if one.name == LINK:
                object.__setattr__(self, "channels", tuple(other for other in self.channels if other.name != LINK))
                object.__setattr__(self, "links", {name: tuple(chats) for name, chats in one.options.items()})
        if self.store != self.home / DEFAULT_STORE:
            object.__setattr__(self, "store_named", True)

    @property
    def keep_requests_seconds(self) -> float:
        """How long sessionless API requests are kept; 0 for forever."""
        return sources.seconds_in(self.keep_requests)

    @property
    def addresses(self) -> frozenset[str]:
        """The web addresses in the settings."""
        own = (value for item in KEYS if item.url and (value := getattr(self, item.attribute)))
        return frozenset([*own, *(server.url for server in self.mcp if server.url)])

    def is_home_workspace(self, folder: str | Path) -> bool:
        """Return whether it is the user's own workspace: the one in the home, or the one configured in config.toml."""
        real = Path(folder).resolve()
        return real in (self.home_workspace.resolve(), (self.home / "workspace").resolve())

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any] | None = None,
        env: Mapping[str, str] = os.environ,
        home: str | os.PathLike[str] | None = None,
    ) -> Config:
        """Load the user's settings. Flags that are None and empty variables count as unset."""
        folder = sources.find_home(home, env)
        file, variables = sources.from_file(folder / "config.toml", KEYS), sources.from_environment(env, KEYS)
        values = sources.over(file, variables)
        tied = "api_key" not in variables or not sources.ENDPOINT.isdisjoint(variables)
        values = sources.over(values, sources.from_flags(flags or {}, KEYS), tied)
        own = file.get("workspace", folder / "workspace")
        return cls(home=folder, home_workspace=own, store_named="store" in values, **values)


KEYS: tuple[Key, ...] = keys_of(Config)
