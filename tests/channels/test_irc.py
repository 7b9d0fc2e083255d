"""IRC, against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everloop.channels.base import Options
from everloop.channels.irc import Irc, parse
from everloop.channels.links import LinkStore
from everloop.testing.channels import conform, running

from .ircd import IrcNetwork
from .says import Recalls, Says, found, until


@pytest.fixture
async def irc() -> AsyncIterator[IrcNetwork]:
    async with IrcNetwork().running() as made:
        yield made


@pytest.mark.timeout(300)
async def test_nothing_is_doubled_and_no_answer_lost_whichever_write_is_the_last(tmp_path: Path) -> None:
    report = await conform(lambda: IrcNetwork().running(), tmp_path, chats=("anna", "bert"), step=6)
    assert report.problems == []
    assert report.kills >= 2


def test_a_line_is_parsed_as_the_protocol_says() -> None:
    line = parse("@account=anna;x=a\\:b\\s :anna!u@h PRIVMSG #garden :hello :there")
    assert (line.command, line.params, line.nick) == ("PRIVMSG", ["#garden", "hello :there"], "anna")
    assert line.tags == {"account": "anna", "x": "a;b "}
    assert parse("PING x").params == ["x"]
    assert parse("").command == ""


async def test_a_channel_is_a_group_and_its_lines_are_parts(irc: IrcNetwork, tmp_path: Path) -> None:
    irc.settings |= {"join": ["#garden"], "groups": ["#Garden"]}
    says = Says("**first** line\n\n- second")
    async with running(irc.settings, tmp_path, says) as store:
        anna = await irc.person("anna")
        anna.write("JOIN #garden")
        await until(lambda: any("everbot" in line.params[-1] for line in anna.lines if line.command in ("353", "JOIN"))
                    or any(line.nick == "everbot" for line in anna.lines))  # fmt: skip
        await anna.tell("#garden", "nobody is meant")
        await anna.tell("#GARDEN", "everbot: what grows?")  # the same channel
        await until(lambda: len(irc.heard("#garden")) == 2)
        assert [info.key for info in await store.sessions("me")] == ["irc:#garden"]
    assert says.asked == ["anna: what grows?"]
    assert irc.heard("#garden") == ["first line", "• second"]


def test_a_channel_has_one_session_whatever_the_case_of_its_name() -> None:
    """Servers may deliver the name as the sender has written it."""
    channel = Irc(Options("irc", {"server": "x", "nick": "everbot"}, {}))
    messages = [channel._received(parse(f":anna!a@b PRIVMSG {name} :hi")) for name in ("#Garden", "#GARDEN", "#garden")]
    assert [(one.chat, one.group) for one in messages if one is not None] == 3 * [("#garden", True)]


async def test_a_message_to_a_missing_nick_becomes_a_dead_letter(irc: IrcNetwork, tmp_path: Path) -> None:
    from everloop.channels.access import tell

    async with running(irc.settings, tmp_path) as store:
        await tell(store, "irc", "me", "nobody", "hello", "1")
        (dead,) = await found(lambda: store.dead_letters("irc"))
    assert dead.reason.startswith("401 ")


async def test_an_answer_cannot_contain_a_command(irc: IrcNetwork, tmp_path: Path) -> None:
    async with running(irc.settings, tmp_path, Says("hello\rQUIT :gone\n\x00NICK other")):
        await irc.say("anna", "hi")
        await until(lambda: len(irc.heard("anna")) == 2)
        await irc.say("anna", "still there?")
        await until(lambda: len(irc.heard("anna")) == 4)
    assert irc.heard("anna")[:2] == ["hello QUIT :gone", "NICK other"]


async def test_it_uses_tls_and_checks_the_certificate_and_the_password(tmp_path: Path) -> None:
    here = Path(__file__).parents[1] / "certificates"
    async with IrcNetwork(tls=(here / "localhost.pem", here / "localhost.key"), password="let-me-in").running() as irc:
        irc.settings |= {"server": "localhost", "password": "let-me-in", "ca_file": str(here / "ca.pem")}
        async with running(irc.settings, tmp_path):
            await irc.say("anna", "hi")
            await until(lambda: irc.heard("anna") == ["re: hi"])
        (tmp_path / "other").mkdir()
        irc.settings |= {"ca_file": ""}
        async with running(irc.settings, tmp_path / "other") as store:
            state = await found(lambda: store.channel_state("irc"))
            assert "certificate verify failed" in state["status"]
            assert "let-me-in" not in state["status"]


async def test_a_person_who_takes_a_nick_gets_nothing_of_what_was_said_under_it(
    irc: IrcNetwork, tmp_path: Path
) -> None:
    async with running(irc.settings, tmp_path, Recalls()) as store:
        await irc.say("anna", "a secret")
        await until(lambda: irc.heard("anna") == ["a secret"])
        eve = await irc.person("eve")
        await (await irc.person("anna")).close()
        while not any(line.command == "NICK" and line.params == ["anna"] for line in eve.lines):
            eve.write("NICK anna")
            await asyncio.sleep(0.05)
        await eve.tell("everbot", "what did I tell you?")
        await until(lambda: irc.heard("eve"))
        assert len(await store.sessions("me")) == 2
    assert irc.heard("eve") == ["what did I tell you?"]


async def test_a_person_who_takes_a_nick_links_nothing_and_ends_no_link(irc: IrcNetwork, tmp_path: Path) -> None:
    irc.settings["allow"] = [f"{name}!~{name}@127.0.0.1" for name in ("anna", "bert", "carl")]
    async with running(irc.settings, tmp_path, Says("ok")) as store:
        codes = []
        for name in ("anna", "bert"):
            await irc.say(name, " /link")
            await until(lambda name=name: irc.heard(name))  # type: ignore[misc]
            codes.append(irc.heard(name)[0].split()[4][:8])
        await irc.say("carl", f" /link {codes[0]}")
        await until(lambda: irc.heard("carl"))
        eve = await irc.person("eve")
        await (await irc.person("anna")).close()
        while not any(line.command == "NICK" and line.params == ["anna"] for line in eve.lines):
            eve.write("NICK anna")
            await asyncio.sleep(0.05)
        for text in (" /link", f" /link {codes[1]}", " /unlink", "what was said?", " /status"):
            await eve.tell("everbot", text)
        await irc.say("carl", "still there?")
        await until(lambda: irc.heard("carl")[-1] == "ok")
        (shared,) = (await LinkStore(store, "me").read()).shared
        assert [one.account for one in shared.members] == [f"irc:{name}!~{name}@127.0.0.1" for name in ("anna", "carl")]
    assert irc.heard("eve") == []


async def test_a_person_who_changes_their_nick_has_the_same_limit(irc: IrcNetwork, tmp_path: Path) -> None:
    irc.settings["per_minute"] = 2
    says = Says("ok")
    async with running(irc.settings, tmp_path, says):
        eve = await irc.person("eve")
        for number, answers in enumerate((2, 3, 3)):
            eve.write(f"NICK eve{number}")
            for text in ("one", "two"):
                await eve.tell("everbot", f"{text} of {number}")
            await until(lambda answers=answers: len(irc.heard("eve")) >= answers)  # type: ignore[misc]
    assert says.asked == ["one of 0", "two of 0"]
    assert [text for text in irc.heard("eve") if text != "ok"] == [
        "That was too fast: I take 2 messages a minute. Send it again later."
    ]


class SaslServer:
    """The part of a server that SASL needs: the login, and an account on each message."""

    def __init__(self) -> None:
        self.logins: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replies = {
            "CAP LS 302": ":s CAP * LS :sasl=PLAIN account-tag",
            "CAP REQ :account-tag sasl": ":s CAP * ACK :account-tag sasl",
            "AUTHENTICATE PLAIN": "AUTHENTICATE +",
            "CAP END": ":s 001 everbot :Welcome\r\n@account=anna :x!y@z PRIVMSG everbot :hi",
        }
        while line := (await reader.readline()).decode().strip():
            if line.startswith("AUTHENTICATE ") and line != "AUTHENTICATE PLAIN":
                self.logins.append(line.partition(" ")[2])
                writer.write(b":s 903 everbot :ok\r\n")
            elif line in replies:
                writer.write(f"{replies[line]}\r\n".encode())
            elif line.startswith("PING "):
                writer.write(f":s PONG s {line[5:]}\r\n".encode())
        writer.close()


async def test_it_logs_in_with_sasl_and_identifies_people_by_their_accounts(tmp_path: Path) -> None:
    fake = SaslServer()
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    settings = {"name": "irc", "server": "127.0.0.1", "port": port, "tls": False, "nick": "everbot",
                "account": "ever", "password": "secret", "allow": ["anna"]}  # fmt: skip
    says = Says("hello")
    async with server, running(settings, tmp_path, says):
        await until(lambda: says.asked)
    assert fake.logins == ["AGV2ZXIAc2VjcmV0"]
    assert says.asked == ["hi"]
