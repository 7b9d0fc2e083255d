"""The agent behind the Agent Client Protocol: an editor opens sessions in its folders and prompts them."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from acp import PROTOCOL_VERSION, RequestError, text_block, tool_content, update_agent_message_text
from acp.interfaces import Client
from acp.schema import (
    AgentCapabilities,
    AllowedOutcome,
    AuthenticateResponse,
    ClientCapabilities,
    CloseSessionResponse,
    FileSystemCapabilities,
    ForkSessionResponse,
    HttpMcpServer,
    Implementation,
    InitializeResponse,
    ListSessionsResponse,
    LoadSessionResponse,
    McpCapabilities,
    McpServerStdio,
    NewSessionResponse,
    PermissionOption,
    PromptCapabilities,
    PromptResponse,
    ResumeSessionResponse,
    SessionCapabilities,
    SessionCloseCapabilities,
    SessionConfigOptionSelect,
    SessionConfigSelectOption,
    SessionForkCapabilities,
    SessionInfo,
    SessionListCapabilities,
    SessionMode,
    SessionModeState,
    SessionResumeCapabilities,
    SetSessionConfigOptionResponse,
    SetSessionModeResponse,
    ToolCallUpdate,
    UsageUpdate,
)

from .. import events
from .._version import __version__
from ..bus import InboundMessage, is_inside
from ..commands import Answer
from ..config import Config, McpServer
from ..errors import EverloopError
from ..runtime.agent import AgentLoop, TurnResult
from ..runtime.attached import sessions_of, take_turn, working
from ..runtime.owners import OWN
from ..sandbox.reach import within
from ..text import one_line
from ..tools.base import ToolError
from ..tools.context import current_call
from ..tools.files.files import file_tools
from ..tools.shell.shell import Exec
from .updates import TurnUpdates, Update, of_log, read_prompt

ABSENT = (-32002, -32601)  # the editor does not have the file, or does not support the request: use the file on disk


class EditorFiles:
    """Access to the files of an editor's folder, used by the agent's file tools.

    The tools have already checked that the call may access the path. The editor itself is not confined, though: while a
    confined command runs in the folder, which could replace a parent folder by a link, the agent accesses the disk
    directly. `folder` is a real path, `session` returns the session to name for a call, and `is_busy` returns whether
    such a command is running.
    """

    def __init__(
        self,
        client: Client,
        offered: FileSystemCapabilities,
        folder: str,
        session: Callable[[str], str | None],
        is_busy: Callable[[], bool],
    ) -> None:
        self._client = client
        self._offered = offered
        self._folder = folder
        self._session = session
        self._is_busy = is_busy

    async def read(self, real: str, *, to_write: bool = False) -> str | None:
        session = self._session_for(real)
        if not self._offered.read_text_file or (to_write and not self._offered.write_text_file) or session is None:
            return None
        try:
            return (await self._client.read_text_file(session_id=session, path=real)).content
        except RequestError as error:
            if error.code in ABSENT:
                return None
            raise _refused("read", real, error) from None  # the user may have refused

    async def write(self, real: str, text: str) -> bool:
        session = self._session_for(real)
        if not self._offered.write_text_file or session is None:
            return False
        try:
            await self._client.write_text_file(session_id=session, path=real, content=text)
        except RequestError as error:
            raise _refused("write", real, error) from None
        return True

    def _session_for(self, real: str) -> str | None:
        """Return the session to name to the editor; None if the editor is not asked for this file."""
        if not within(real, self._folder) or self._is_busy():
            return None
        return self._session(current_call().session)


def _refused(what: str, real: str, error: RequestError) -> ToolError:
    details = error.data.get("details") if isinstance(error.data, dict) else None
    return ToolError(f"The editor did not {what} {real}: {one_line(str(details or error), 200)}")


CHANNEL = "acp"
PAGE = 50  # sessions per page of the list
MAX_KEY = 200
CONNECT_SECONDS = 120.0  # for an editor's MCP server, which may be downloaded at its first start
StopReason = Literal["end_turn", "max_tokens", "max_turn_requests", "refusal", "cancelled"]
STOP_REASONS: dict[str, StopReason] = {
    "cancelled": "cancelled",
    "replaced": "cancelled",
    "max_rounds": "max_turn_requests",
}
MODES = {
    "ask": SessionMode(id="ask", name="Ask", description="Calls that the policy asks about are asked here."),
    "refuse": SessionMode(id="refuse", name="Never ask", description="Calls that would be asked about are refused."),
}
OPTIONS = [
    PermissionOption(option_id="once", name="Allow", kind="allow_once"),
    PermissionOption(option_id="always", name="Allow for this session", kind="allow_always"),
    PermissionOption(option_id="refuse", name="Refuse", kind="reject_once"),
]


@dataclasses.dataclass(slots=True)
class EditorSession:
    """A session that the editor has open."""

    key: str
    folder: Path
    servers: tuple[McpServer, ...]
    model: str
    agent: AgentLoop
    mode: str = "ask"
    cancelled: bool = False


class EditorAgent:
    """Handles an editor's requests. Each folder has an agent of its own, with the sessions of that folder.

    `enter` returns the settings for work in a folder: whether its files are trusted, and where its store is. It blocks.
    """

    def __init__(self, config: Config, enter: Callable[[Path], Config]) -> None:
        self._config = config
        self._enter = enter
        self._client: Client | None = None
        self._files = FileSystemCapabilities()  # what the editor itself offers
        self._agents: dict[str, AgentLoop] = {}
        self._sessions: dict[str, EditorSession] = {}
        self._opening = asyncio.Lock()
        self._open = AsyncExitStack()

    async def close(self) -> None:
        """Stop all work. Running turns stay open on disk; the next start resumes them."""
        await self._open.aclose()

    def on_connect(self, conn: Client) -> None:
        self._client = conn

    # ------------------------------------------------------------------------------------------ the connection

    async def initialize(
        self, protocol_version: int, client_capabilities: ClientCapabilities | None = None, **_: Any
    ) -> InitializeResponse:
        self._files = (client_capabilities and client_capabilities.fs) or FileSystemCapabilities()
        return InitializeResponse(
            protocol_version=min(protocol_version, PROTOCOL_VERSION),
            agent_info=Implementation(name="everloop", title="Everloop", version=__version__),
            agent_capabilities=AgentCapabilities(
                load_session=True,
                prompt_capabilities=PromptCapabilities(image=True, audio=False, embedded_context=True),
                mcp_capabilities=McpCapabilities(http=True, sse=False),
                session_capabilities=SessionCapabilities(
                    list=SessionListCapabilities(),
                    resume=SessionResumeCapabilities(),
                    fork=SessionForkCapabilities(),
                    close=SessionCloseCapabilities(),
                ),
            ),
            auth_methods=[],
        )

    async def authenticate(self, method_id: str, **_: Any) -> AuthenticateResponse:
        """Accept: the agent runs as the user who started the editor, so there is nothing to authenticate."""
        return AuthenticateResponse()

    # ------------------------------------------------------------------------------------------ sessions

    async def new_session(
        self, cwd: str, additional_directories: Any = None, mcp_servers: Sequence[Any] | None = None, **_: Any
    ) -> NewSessionResponse:
        session = await self._opened(f"{CHANNEL}:{secrets.token_hex(8)}", cwd, mcp_servers)
        return NewSessionResponse(
            session_id=session.key, modes=_modes(session), config_options=self._config_options(session)
        )

    async def load_session(
        self, cwd: str, session_id: str, mcp_servers: Sequence[Any] | None = None, **_: Any
    ) -> LoadSessionResponse:
        """Open a session of the folder and replay it to the editor."""
        session = await self._opened(session_id, cwd, mcp_servers, new=False)
        info = await session.agent.store.session(OWN, session.key)
        for update in of_log(await session.agent.store.read_log(info.id) if info else (), session.folder):
            await self.send(session.key, update)
        return LoadSessionResponse(modes=_modes(session), config_options=self._config_options(session))

    async def resume_session(
        self, cwd: str, session_id: str, mcp_servers: Sequence[Any] | None = None, **_: Any
    ) -> ResumeSessionResponse:
        """Open a session of the folder that the editor already shows."""
        session = await self._opened(session_id, cwd, mcp_servers, new=False)
        return ResumeSessionResponse(modes=_modes(session), config_options=self._config_options(session))

    async def fork_session(
        self, cwd: str, session_id: str, mcp_servers: Sequence[Any] | None = None, **_: Any
    ) -> ForkSessionResponse:
        """Open a copy of a session of the folder."""
        folder = _folder(cwd)
        store = (await self._agent(folder, (), "")).store
        info = await store.session(OWN, session_id) if not is_inside(session_id) else None
        if info is None:
            raise RequestError(-32002, f"there is no session {one_line(session_id, 60)} in {folder}")
        if info.open_turn is not None:
            raise _invalid("the session is running or waits for an answer: copy it once its turn has ended")
        key = f"{CHANNEL}:{secrets.token_hex(8)}"
        await store.fork(OWN, session_id, info.entries, key)
        session = await self._opened(key, cwd, mcp_servers)
        return ForkSessionResponse(session_id=key, modes=_modes(session), config_options=self._config_options(session))

    async def close_session(self, session_id: str, **_: Any) -> CloseSessionResponse:
        """Stop the session's turn. The session is kept, and can be loaded again."""
        await self.cancel(session_id)
        self._sessions.pop(session_id, None)
        return CloseSessionResponse()

    async def list_sessions(self, cwd: str | None = None, cursor: str | None = None, **_: Any) -> ListSessionsResponse:
        folder = _folder(cwd) if cwd else self._config.workspace
        agent = await self._agent(folder, (), "")
        first = int(cursor) if cursor and cursor.isdecimal() else 0
        found = await sessions_of(agent.store, PAGE + 1, first)
        listed = [
            SessionInfo(
                session_id=info.key,
                cwd=str(folder),
                title=title,
                updated_at=datetime.fromtimestamp(info.updated_at, UTC).isoformat(),
            )
            for info, title in found[:PAGE]
        ]
        return ListSessionsResponse(sessions=listed, next_cursor=str(first + PAGE) if len(found) > PAGE else None)

    async def set_session_mode(self, mode_id: str, session_id: str, **_: Any) -> SetSessionModeResponse:
        session = self._session(session_id)
        if mode_id not in MODES:
            raise _invalid(f"there is no mode {mode_id}: {', '.join(MODES)}")
        session.mode = mode_id
        return SetSessionModeResponse()

    async def set_config_option(
        self, config_id: str, session_id: str, value: str | bool, **_: Any
    ) -> SetSessionConfigOptionResponse:
        """Choose the model for later prompts, from those in the settings."""
        session = self._session(session_id)
        if config_id != "model" or value not in self._models():
            raise _invalid(f"{config_id} cannot be set to {one_line(str(value), 60)}")
        session.agent = await self._agent(session.folder, session.servers, str(value))
        session.model = str(value)
        return SetSessionConfigOptionResponse(config_options=self._config_options(session) or [])

    async def _opened(self, key: str, cwd: str, servers: Sequence[Any] | None, *, new: bool = True) -> EditorSession:
        folder = _folder(cwd)
        if not key.strip() or not key.isprintable() or len(key) > MAX_KEY or is_inside(key):
            raise _invalid("this is not a user's session")
        if (there := self._sessions.get(key)) is not None and there.folder != folder:
            raise _invalid(f"{key} is open in {there.folder}")
        named = tuple(_server(one) for one in servers or ())
        agent = await self._agent(folder, named, "")
        if not new and await agent.store.session(OWN, key) is None:
            raise RequestError(-32002, f"there is no session {key} in {folder}")
        session = self._sessions[key] = EditorSession(key, folder, named, self._config.model, agent)
        return session

    async def _agent(self, folder: Path, servers: tuple[McpServer, ...], model: str) -> AgentLoop:
        """Return the agent for a folder, with the editor's MCP servers in addition to those of the settings."""
        name = repr((folder, servers, model or self._config.model))
        async with self._opening:
            if name not in self._agents:
                try:
                    config = await asyncio.to_thread(self._enter, folder)
                    if servers:
                        config = dataclasses.replace(config, mcp=(*config.mcp, *servers))
                    if model:
                        config = dataclasses.replace(config, model=model)
                    agent = self._agents[name] = await self._open.enter_async_context(working(config))
                    agent.subagents.wait_for_all()  # a turn that no prompt opened would not be shown
                    self._offer_files(agent, folder)
                except EverloopError as error:
                    raise RequestError(-32603, str(error)) from None
        return self._agents[name]

    def _offer_files(self, agent: AgentLoop, folder: Path) -> None:
        """Make the agent read and write files through the editor, as far as the editor supports it."""
        if self._client is None or not (self._files.read_text_file or self._files.write_text_file):
            return

        def session_of(key: str) -> str | None:
            opened = [one.key for one in self._sessions.values() if one.folder == folder]
            return key if key in opened else next(reversed(opened), None)  # a sub-agent has a session of its own

        def is_busy() -> bool:
            tools = (agent.tools.get("exec") for agent in self._agents.values())
            return any(isinstance(tool, Exec) and tool.is_running(workspace) for tool in tools)

        workspace = os.path.realpath(folder)
        for tool in file_tools(EditorFiles(self._client, self._files, workspace, session_of, is_busy)):
            if agent.tools.has(tool.name):
                agent.tools.register(tool)

    def _session(self, key: str) -> EditorSession:
        if key not in self._sessions:
            raise RequestError(-32002, f"the session {one_line(key, 60)} is not open: load it first")
        return self._sessions[key]

    def _models(self) -> list[str]:
        config = self._config
        named = (one for one in config.server_models if not set(one) & set("*?["))
        return list(dict.fromkeys(filter(None, (config.model, *config.fallbacks, *named))))

    def _config_options(self, session: EditorSession) -> list[Any] | None:
        if len(self._models()) < 2:
            return None
        return [
            SessionConfigOptionSelect(
                id="model",
                name="Model",
                category="model",
                type="select",
                current_value=session.model,
                options=[SessionConfigSelectOption(value=name, name=name) for name in self._models()],
            )
        ]

    # ------------------------------------------------------------------------------------------ turns

    async def prompt(self, session_id: str, prompt: Sequence[Any], **_: Any) -> PromptResponse:
        session = self._session(session_id)
        text, parts = read_prompt(prompt)
        if not text.strip() and parts is None:
            raise _invalid("the prompt is empty")
        session.cancelled = False
        turn = _ShownTurn(self, session)
        message = InboundMessage(CHANNEL, "user", session.key, text, session=session.key, reply=False, parts=parts)
        pump = asyncio.create_task(turn.pump())
        try:
            decide = turn.decide if session.mode == "ask" else None
            result = await take_turn(session.agent, message, turn.watch, decide)
            await turn.finish(result)
        finally:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
        if result.reason == "error":
            raise RequestError(-32603, one_line(result.error or result.text, 500))
        if result.reason == "question" and session.cancelled:
            await session.agent.conversations.stop(OWN, session.key, "user")
            return PromptResponse(stop_reason="cancelled")
        return PromptResponse(stop_reason=STOP_REASONS.get(result.reason, "end_turn"))

    async def cancel(self, session_id: str, **_: Any) -> None:
        session = self._session(session_id)
        session.cancelled = True
        await session.agent.conversations.stop(OWN, session.key, "user")

    async def send(self, key: str, update: Update) -> None:
        if self._client is not None:
            await self._client.session_update(session_id=key, update=update)

    async def ask_person(self, session: EditorSession, question: str, calls: tuple[str, ...]) -> Answer | None:
        """Ask for permission in the editor; None if the person has not answered, which leaves the question open."""
        assert self._client is not None
        call = ToolCallUpdate(
            tool_call_id=calls[0] if calls else "question",
            title=one_line(question, 120),
            status="pending",
            content=[tool_content(text_block(question))],
        )
        said = await self._client.request_permission(session_id=session.key, tool_call=call, options=OPTIONS)
        if not isinstance(said.outcome, AllowedOutcome):
            return None
        if said.outcome.option_id not in ("once", "always"):
            return Answer(False)
        return Answer(True, always=said.outcome.option_id == "always")

    # ------------------------------------------------------------------------------------------ what is not offered

    async def ext_method(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        raise RequestError.method_not_found(method)

    async def ext_notification(self, method: str, params: dict[str, Any]) -> None:
        """Ignore unknown notifications, as the protocol requires."""


class _ShownTurn:
    """Sends the events of a turn to the editor, in order."""

    def __init__(self, editor: EditorAgent, session: EditorSession) -> None:
        self._editor = editor
        self._session = session
        self._updates: asyncio.Queue[Update] = asyncio.Queue()
        self._turn = TurnUpdates(session.folder)
        self._said = ""

    def watch(self, event: events.Event) -> None:
        if isinstance(event, events.Text):
            self._said += event.text
        for update in self._turn.after(event):
            self._updates.put_nowait(update)

    async def pump(self) -> None:
        while True:
            update = await self._updates.get()
            try:
                await self._editor.send(self._session.key, update)
            finally:
                self._updates.task_done()

    async def decide(self, question: str, calls: tuple[str, ...]) -> Answer | None:
        await self._updates.join()
        return await self._editor.ask_person(self._session, question, calls)

    async def finish(self, result: TurnResult) -> None:
        """Send what was not streamed, and how much of the model's context window is used."""
        if result.text.strip() and result.reason != "error" and not self._said.endswith(result.text.strip()):
            self._updates.put_nowait(update_agent_message_text(result.text))
        used, size = await self._session.agent.context_use(self._session.key)
        self._updates.put_nowait(UsageUpdate(session_update="usage_update", used=used, size=size))
        await self._updates.join()


def _modes(session: EditorSession) -> SessionModeState:
    return SessionModeState(current_mode_id=session.mode, available_modes=list(MODES.values()))


def _folder(cwd: str) -> Path:
    folder = Path(cwd)
    if not folder.is_absolute() or not folder.is_dir():
        raise _invalid(f"{one_line(cwd, 200)} is not the absolute path of a folder")
    return folder


def _server(given: Any) -> McpServer:
    """Convert an MCP server from the editor to a setting."""
    match given:
        case McpServerStdio():
            return McpServer(
                name=given.name,
                command=given.command,
                args=tuple(given.args),
                env={one.name: one.value for one in given.env},
                connect_timeout=CONNECT_SECONDS,
            )
        case HttpMcpServer():
            headers = {one.name: one.value for one in given.headers}
            return McpServer(name=given.name, url=given.url, headers=headers, connect_timeout=CONNECT_SECONDS)
    raise _invalid("only MCP servers over stdio and HTTP are supported")


def _invalid(what: str) -> RequestError:
    return RequestError(-32602, what)
