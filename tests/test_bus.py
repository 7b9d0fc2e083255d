"""The bus: bounded, in order, and addressed."""

from __future__ import annotations

import asyncio

import pytest

from everloop.bus import InboundMessage, MessageBus, OutboundMessage
from everloop.commands import command_of, kind_of


async def test_messages_come_out_in_the_order_they_went_in():
    bus = MessageBus()
    for n in range(3):
        await bus.publish_inbound(InboundMessage("a", "b", "c", str(n)))
        await bus.publish_outbound(OutboundMessage("a", "c", str(n)))
    assert (bus.inbound_size, bus.outbound_size) == (3, 3)
    assert [(await bus.consume_inbound()).content for _ in range(3)] == ["0", "1", "2"]
    assert [(await bus.consume_outbound()).content for _ in range(3)] == ["0", "1", "2"]


async def test_numeric_ids_of_a_chat_network_become_strings_and_other_types_are_refused():
    message = InboundMessage("telegram", 7, 42, "hi", id=1001)  # type: ignore[arg-type]
    assert (message.sender_id, message.chat_id, message.id) == ("7", "42", "1001")
    assert (message.session, message.session_key) == (None, "telegram:42")
    with pytest.raises(TypeError, match="chat_id must be a text, not NoneType"):
        InboundMessage("telegram", "7", None, "hi")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="content of a message must be a text, not int"):
        InboundMessage("telegram", "7", "42", 5).addressed()  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes an InboundMessage, not str"):
        await MessageBus().publish_inbound("hi")  # type: ignore[arg-type]


def test_none_for_media_and_metadata_means_nothing():
    message = InboundMessage("telegram", "7", "42", "hi", media=None, metadata=None)  # type: ignore[arg-type]
    assert (message.media, message.metadata) == ([], {})


@pytest.mark.parametrize("side", ["inbound", "outbound"])
async def test_a_full_bus_makes_its_publisher_wait(side):
    bus = MessageBus(size=2)

    async def publish(text: str) -> None:
        if side == "inbound":
            await bus.publish_inbound(InboundMessage("a", "b", "c", text))
        else:
            await bus.publish_outbound(OutboundMessage("a", "c", text))

    await publish("1")
    await publish("2")
    third = asyncio.create_task(publish("3"))
    await asyncio.sleep(0.01)
    assert not third.done()
    consume = bus.consume_inbound if side == "inbound" else bus.consume_outbound
    assert (await consume()).content == "1"
    await asyncio.wait_for(third, 20)
    assert [(await consume()).content for _ in range(2)] == ["2", "3"]


async def test_the_publisher_is_notified_when_a_message_is_taken():
    bus, taken = MessageBus(), []
    await bus.publish_outbound(OutboundMessage("a", "c", "x"), lambda: taken.append(1))
    assert taken == []
    await bus.consume_outbound()
    assert taken == [1]


async def test_a_cancelled_consumer_takes_nothing_with_it():
    bus = MessageBus()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(bus.consume_outbound(), 0.01)
    await bus.publish_outbound(OutboundMessage("a", "c", "x"))
    assert (await bus.consume_outbound()).content == "x"


@pytest.mark.parametrize(
    ("channel", "chat_id", "origin", "session"),
    [
        ("telegram", "12", ("telegram", "12"), "telegram:12"),
        ("telegram", "12:7", ("telegram", "12:7"), "telegram:12:7"),
        ("system", "telegram:12:7", ("telegram", "12:7"), "telegram:12:7"),
        ("system", "direct", ("cli", "direct"), "cli:direct"),
    ],
)
def test_a_message_knows_its_chat_and_its_session(channel, chat_id, origin, session):
    message = InboundMessage(channel, "u", chat_id, "hi")
    assert message.session_key == f"{channel}:{chat_id}"
    assert message.origin == origin
    assert message.addressed().session_key == session
    assert message.session is None  # the message itself is unchanged


def test_an_explicit_session_is_kept():
    assert InboundMessage("cli", "u", "x", "hi", session="cli:mine").addressed().session_key == "cli:mine"
    assert InboundMessage("system", "u", "a:b", "hi", session="cli:mine").addressed().session_key == "cli:mine"


def test_two_messages_never_share_their_media_and_metadata():
    first, second = InboundMessage("a", "b", "c", "1"), InboundMessage("a", "b", "c", "2")
    first.media.append("x")
    first.metadata["x"] = 1
    assert second.media == []
    assert second.metadata == {}


@pytest.mark.parametrize(
    ("text", "name", "kind"),
    [
        ("/stop", "stop", "urgent"),
        (" /Status ", "status", "urgent"),
        ("/help@bot", "help", "urgent"),
        ("/new", "new", "command"),
        ("/new chat", None, "message"),
        ("new", None, "message"),
        ("/", None, "message"),
        ("", None, "message"),
        ("//stop", None, "message"),
        ("/approve", "approve", "urgent"),
        ("/approve it", None, "message"),
        ("/deny", "deny", "urgent"),
        ("/Deny@bot it rains", "deny", "urgent"),
    ],
)
def test_a_command_is_a_slash_and_a_known_name_and_nothing_more(text, name, kind):
    assert command_of(text) == name
    assert kind_of(InboundMessage("test", "user", "1", text)) == kind
    assert kind_of(InboundMessage("system", "sub", "test:1", text)) == "message"  # an agent's text is no command
