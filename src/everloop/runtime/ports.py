"""What the engine's ports are in an agent loop: a provider, a registry of tools, a session's log in the store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from .. import events
from ..bus import PULLED, InboundMessage, OutboundMessage
from ..context.prompt import Composer
from ..context.window import Measure
from ..engine import Review
from ..log import Call, Entry, TurnEnded, UserSaid, Written
from ..messages import Conversation
from ..providers.base import LLMProvider, LLMResponse, counts
from ..store.base import Claim, Finished, Store
from ..threads import in_thread
from ..tools.base import Plan
from ..tools.context import CallContext
from ..tools.policy.policy import Policy, Verdict
from ..tools.policy.taint import is_free
from ..tools.registry import ToolRegistry, ToolResult, error_result, failure_of
from .asking import ask
from .budgets import Budgets
from .clients import brought_by, discreet
from .images import Free, ImageFilter, plain_images
from .session import Live

AGAIN = "Call it again."
HOW_TO_ANSWER = (
    "Answer y (yes), n (no) or a (always in this session). "
    "/approve, /deny and /approve always do the same; words after /deny tell me why."
)
DENIED_ADVICE = "Do not try to get around this. Do without it, or tell the user what you would need."


class Asking:
    """The model: streamed when somebody watches and the provider can, in one piece otherwise."""

    def __init__(
        self,
        provider: LLMProvider,
        model: str | None,
        tools: ToolRegistry,
        measure: Measure,
        budgets: Budgets,
        claim: Claim,
        options: Mapping[str, Any] | None = None,
        text_calls: bool = True,
        compose: Composer | None = None,
        free: Callable[[Conversation], Free | None] = lambda conversation: None,
    ) -> None:
        self._compose = compose
        self._free = free
        self._options = options
        self._text_calls = text_calls
        self._provider = provider
        self._model = model
        self._tools = tools
        self._measure = measure
        self._budgets = budgets
        self._claim = claim
        self._brought = brought_by(claim)

    async def __call__(self, conversation: Conversation, emit: events.Emit | None) -> LLMResponse:
        limited = self._budgets.limits(self._claim)
        tokens = self._measure.tokens(conversation) if limited else 0
        if limited:
            await self._budgets.check(self._claim, self._measure.model, tokens)
        tools = self._tools.get_definitions() or None
        free = self._free(conversation)
        images = ImageFilter(emit, free) if emit is not None and free is not None else None
        try:
            request = conversation if self._compose is None else await in_thread(self._compose, conversation)
            response = await ask(
                self._provider,
                request,
                tools,
                self._model,
                images or emit,
                self._options,
                text_calls=self._text_calls,
                brought=self._brought,
            )
        except Exception as error:
            if (told := discreet(self._claim.owner, error)) is not error:
                raise told from None
            raise
        if images is not None:
            images.end()
        if free is not None and isinstance(content := getattr(response, "content", None), str):
            response = replace(response, content=plain_images(content, free))
        usage = counts(response)
        if limited:
            estimate = tokens + len(response.content or "") // 4
            self._budgets.spend(self._claim, response.model or self._measure.model, usage, estimate)
        if (counted := usage.get("prompt_tokens")) and self._measure.learns():
            self._measure.observe(response.model, self._measure.weight(conversation), counted)
        if isinstance(response, LLMResponse):  # a provider of somebody's own may give anything
            response.model = response.model or self._model or self._measure.model
        return response


class Context(Protocol):
    """Makes the context of one call."""

    def __call__(self, call: Call, progress: Callable[[str], None], approved: bool = False) -> CallContext: ...


class Tools:
    """The registry's tools under the policy, each call with its own context.

    Where no person can be asked, calls that need approval are refused.
    """

    def __init__(
        self,
        registry: ToolRegistry,
        policy: Policy,
        context: Context,
        attended: bool,
        grants: Callable[[], Awaitable[frozenset[str]]] | None = None,
    ) -> None:
        self._registry = registry
        self._policy = policy
        self._context = context
        self._attended = attended
        self._read_grants = grants
        self._granted: frozenset[str] | None = None  # what the session was granted, once it is read
        self._allowed_before: set[str] = set()  # calls that need no question because of such a grant
        self._failed: dict[str, ToolResult] = {}  # calls that will not run, because no plan of them could be made
        self._unknown: set[str] = set()  # calls of tools that did not exist when they were reviewed
        self.batch = registry.batch
        self.replay_safe = registry.replay_safe

    async def review(self, calls: Sequence[Call], conversation: Conversation) -> Review:
        asked: dict[str, Verdict] = {}
        denied: dict[str, str] = {}
        for call in calls:
            if call.name in self._registry and not self._policy.rules and self._registry.harmless(call.name):
                continue
            if self._granted is None:
                self._granted = await self._read_grants() if self._read_grants is not None else frozenset()
            context = self._made(call, _unwatched)
            planned = self._registry.plan(call, context)
            if planned is None:
                self._unknown.add(call.id)
                continue
            verdict = await judged(self._policy, call.name, *planned, context, conversation)
            self._failed.pop(call.id, None)
            self._allowed_before.discard(call.id)
            if verdict.granted:
                self._allowed_before.add(call.id)
            elif verdict.decision == "deny" and not verdict.why and (failure := planned[1].failure) is not None:
                self._failed[call.id] = failure_of(call.name, failure)
            elif verdict.decision == "deny" or (verdict.decision == "ask" and not self._attended):
                denied[call.id] = error_result(refusal(call.name, verdict), DENIED_ADVICE)
            elif verdict.decision == "ask":
                asked[call.id] = verdict
        verdicts = list(asked.values())
        grants = tuple(dict.fromkeys(name for verdict in verdicts for name in verdict.grants))
        once = tuple(dict.fromkeys(name for verdict in verdicts for name in verdict.once))
        question = _question(verdicts)
        if (free := free_addresses(self._policy, conversation)) is not None:
            question = plain_images(question, free)  # it shows what the model wrote
        return Review(tuple(asked), question, denied, grants, once)

    async def run(self, call: Call, progress: Callable[[str], None], approved: bool) -> ToolResult:
        if (failed := self._failed.get(call.id)) is not None:
            return failed
        context = self._made(call, progress, approved or call.id in self._allowed_before)
        if call.id in self._unknown and call.name in self._registry:
            # It could not have run when the policy looked: a server has come back, say, with a tool of that name.
            return ToolResult(error_result(f"{call.name} was not run: it was not there a moment ago.", AGAIN), "error")
        result = await self._registry.run(call, context)
        if context.taint and self._registry.described_outside:  # what the model has read of the tools stays in the log
            return replace(result, untrusted=True, own_files=False)
        return result

    def _made(self, call: Call, progress: Callable[[str], None], approved: bool = False) -> CallContext:
        made = self._context(call, progress, approved)
        return replace(made, granted=self._granted) if self._granted else made


def free_addresses(policy: Policy, conversation: Conversation) -> Free | None:
    """Which addresses may be loaded by what is said in this conversation; None for all of them."""
    if not policy.taint or not conversation.untrusted:
        return None
    return lambda url: is_free(url, conversation, policy.addresses)


async def judged(
    policy: Policy,
    name: str,
    arguments: dict[str, Any],
    plan: Plan,
    context: CallContext,
    conversation: Conversation,
) -> Verdict:
    """Decide about a call, in a thread where that may take long."""
    given = (name, arguments, plan, context, conversation, conversation.untrusted)
    return await in_thread(policy.judge, *given) if policy.takes_long(arguments) else policy.judge(*given)


def refusal(name: str, verdict: Verdict) -> str:
    """Return why a call is not run: it is denied, or needs approval where no person can be asked."""
    if verdict.decision == "deny":
        return f"{name} was not run: {verdict.why}"
    why = f"{verdict.why.rstrip('.')}. That needs a person's approval, and nobody is there to be asked"
    return f"{name} was not run: {why}."


def _unwatched(text: str) -> None:
    """A call under review shows no progress."""


def _question(asked: Sequence[Verdict]) -> str:
    """What the person is asked: exactly what would run, and why it is asked for."""
    if not asked:
        return ""
    parts = ["May I do this?" if len(asked) == 1 else f"May I do these {len(asked)} things?"]
    parts += [f"{verdict.shown}\n({verdict.why})" for verdict in asked]
    parts.append(HOW_TO_ANSWER)
    return "\n\n".join(parts)


class SessionLog:
    """The log of a claimed session. Its last append closes the turn and puts the answer into the outbox."""

    def __init__(
        self,
        store: Store,
        claim: Claim,
        live: Live,
        answer: Callable[[TurnEnded], Sequence[OutboundMessage]],
        sender: str | None,
        follow: Callable[[TurnEnded], Sequence[InboundMessage]],
    ) -> None:
        self._store = store
        self._claim = claim
        self._live = live
        self._answer = answer
        self._sender = sender
        self._follow = follow
        self.incoming: Sequence[InboundMessage] = ()  # what follows from the turn's end
        self._took: list[int] = []
        self._outgoing: Sequence[OutboundMessage] = ()
        self._finished: Written[Finished] | None = None

    def append(self, entries: Sequence[Entry]) -> Written[Any]:
        took, self._took = self._took, []
        if not isinstance(last := entries[-1], TurnEnded):
            return self._store.append(self._claim, entries, took)
        self._outgoing, self.incoming = self._answer(last), self._follow(last)
        self._finished = self._store.finish(self._claim, entries, self._outgoing, self._sender, took, self.incoming)
        return self._finished

    def park(self, entries: Sequence[Entry], question: str) -> Written[Any]:
        took, self._took = self._took, []
        self._outgoing = reply(self._claim.message, question)
        self._finished = self._store.park(self._claim, entries, self._outgoing, self._sender, took)
        return self._finished

    def steered(self) -> Sequence[UserSaid]:
        steered = self._live.steer
        if not steered:
            return ()
        self._live.steer = []
        self._took += [id for id, _ in steered]
        self._live.taken.update(self._took)
        return [said for _, said in steered]

    def outgoing(self) -> list[tuple[int, OutboundMessage]]:
        """The answer's rows in the outbox, once the turn is closed."""
        return [] if self._finished is None else list(zip(self._finished.result().outbox, self._outgoing, strict=True))

    def more(self) -> bool:
        """Whether the session has more to do, once the turn is closed."""
        return self._finished is None or self._finished.result().more


def reply(message: InboundMessage, text: str) -> list[OutboundMessage]:
    """The message that says this in the chat that asked, if it is to be told at all."""
    channel, chat_id = message.origin
    if not message.reply or channel in PULLED:
        return []
    return [OutboundMessage(channel, chat_id, text, reply_to=message.id, metadata=dict(message.metadata))]
