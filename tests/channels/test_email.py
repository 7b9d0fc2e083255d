"""E-mail, against a real IMAP server."""

from __future__ import annotations

import asyncio
import imaplib
import os
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from everloop.channels import email
from everloop.channels.base import Later, Never, Options, OutgoingFile, Part, Received
from everloop.channels.email import Email, read_envelope, received
from everloop.channels.text import MARK
from everloop.testing.channels import conform, running

from .mail import AGENT, PASSWORD, VERDICT, MailNetwork
from .says import Says, found, until

ANNA, BERT = "anna@example.org", "bert@example.org"
FORGED = "dmarc=pass header.from=example.org"
HIDDEN = "=?utf-8?q?a=29=3B_dmarc=3Dpass_header.from=3Dexample.org_=28b?="  # `a); dmarc=pass … (b` when decoded


def read(data: bytes, auth_server: str = "none") -> Received | None:
    envelope = read_envelope(data, AGENT, auth_server)
    return None if envelope is None else received(envelope, data, len(data), "f")


@pytest.fixture
async def mail() -> AsyncIterator[MailNetwork]:
    async with MailNetwork().running() as made:
        yield made


@pytest.mark.timeout(300)
async def test_nothing_is_lost_or_doubled_whichever_write_is_the_last(tmp_path: Path) -> None:
    report = await conform(lambda: MailNetwork().running(), tmp_path, chats=(ANNA, BERT), step=8)
    assert report.problems == []
    assert report.kills >= 2


async def test_an_answer_stays_in_its_thread_as_text_and_html(mail: MailNetwork, tmp_path: Path) -> None:
    async with running(mail.settings, tmp_path, Says("**Yes**, they are.")) as store:
        await mail.say(ANNA, "Are the beans ripe?", Subject="The garden", References="")
        await until(lambda: mail.mails)
        await mail.say(ANNA, "And the peas?", Subject="Re: The garden", References="<m1@example.org>")
        await until(lambda: len(mail.mails) == 2)  # it arrived while the channel waited in IDLE
        assert [info.key for info in await store.sessions("me")] == [f"email:{ANNA}/<m1@example.org>"]
    answer, second = mail.mails
    assert (answer["Subject"], answer["To"], answer["From"]) == ("Re: The garden", ANNA, AGENT)
    assert (answer["In-Reply-To"], answer["References"]) == ("<m1@example.org>", "<m1@example.org>")
    assert second["References"] == "<m1@example.org> <m2@example.org>"
    assert answer["Auto-Submitted"] == "auto-replied"
    html = answer.get_body(("html",))
    assert html is not None
    assert "<b>Yes</b>, they are." in html.get_content()
    assert mail.heard(ANNA)[0] == "Yes, they are."


NOT_ANSWERED = [
    {"Auto_Submitted": "auto-replied"},
    {"Precedence": "bulk"},
    {"List_Id": "<garden.example.org>"},
    {"Return_Path": "<>"},
    {"Authentication_Results": "mx.home.test; dkim=fail header.d=example.org"},
    {"Authentication_Results": "mx.evil.test; dkim=pass header.d=example.org"},
    {"Authentication_Results": "mx.home.test; dkim=pass header.d=evil.test"},
    {"Authentication_Results": 'mx.home.test; spf=pass smtp.mailfrom="x; dmarc=pass header.from=example.org"@e.t'},
    {"Authentication_Results": ""},
    {"Authentication_Results": f"mx.home.test; spf=pass smtp.mailfrom={HIDDEN}@evil.test"},
    {"Authentication_Results": f"mx.home.test; spf=pass (from {HIDDEN}@evil.test) smtp.mailfrom=x@evil.test"},
    {"Authentication_Results": f"mx.home.test; spf=pass (a (b) ; {FORGED} ) smtp.mailfrom=x@evil.test"},
    {"Authentication_Results": f'mx.home.test; spf=pass (of "a); {FORGED} (b"@evil.test) smtp.mailfrom=x@evil.test'},
    {"Authentication_Results": f'mx.home.test; spf=pass (5"; {FORGED} '},
    {"From": "eve@example.net"},
    {"From": f"{ANNA}, eve@example.net"},
]


async def test_automatic_forged_and_malformed_mails_are_not_answered(mail: MailNetwork, tmp_path: Path) -> None:
    says = Says("hello")
    for number, headers in enumerate(NOT_ANSWERED):
        await mail.say(ANNA, f"canary {number}", **headers)
    async with running(mail.settings, tmp_path, says):
        await mail.say(BERT, "second")
        await until(lambda: mail.mails)
    assert says.asked == ["second"]
    assert [one["To"] for one in mail.mails] == [BERT]


async def test_a_mail_that_reuses_the_id_of_another_persons_mail_does_not_block_it(
    mail: MailNetwork, tmp_path: Path
) -> None:
    async with running(mail.settings, tmp_path, Says("hello")):
        for who in (BERT, ANNA, ANNA):
            await mail.say(who, f"of {who}", Message_ID="<known@example.org>")
        await mail.say(BERT, "last")
        await until(lambda: len(mail.heard(BERT)) == 2)
    assert (len(mail.heard(ANNA)), len(mail.heard(BERT))) == (1, 2)


async def test_a_mail_that_may_have_been_sent_is_repeated_with_its_id_and_a_mark(
    mail: MailNetwork, tmp_path: Path
) -> None:
    mail.lose = 1
    async with running(mail.settings, tmp_path):
        await mail.say(ANNA, "hi")
        await until(lambda: len(mail.mails) == 2)
    assert mail.heard(ANNA) == ["re: hi", f"{MARK} re: hi"]
    assert mail.mails[0]["Message-ID"] == mail.mails[1]["Message-ID"]


async def test_a_mail_to_a_refused_address_becomes_a_dead_letter(mail: MailNetwork, tmp_path: Path) -> None:
    mail.refuse = [b"550 5.1.1 no such user"]
    async with running(mail.settings, tmp_path) as store:
        await mail.say(ANNA, "hi")
        (dead,) = await found(lambda: store.dead_letters("email"))
    assert dead.reason == "SMTP 550: 5.1.1 no such user"


async def test_an_invalid_password_is_reported_without_showing_it(mail: MailNetwork, tmp_path: Path) -> None:
    mail.settings["password"] = f"not-{PASSWORD}"
    async with running(mail.settings, tmp_path) as store:
        state = await found(lambda: store.channel_state("email"))
    assert "IMAP" in state["status"]
    assert PASSWORD not in str(state)


def test_quotes_and_signatures_are_left_out() -> None:
    data = (
        b"From: Anna <anna@example.org>\r\nMessage-ID: <1@x>\r\nSubject: x\r\nIn-Reply-To: <0@x>\r\n\r\n"
        b"Yes, please.\r\n\r\nOn Monday, Agent wrote:\r\n> Shall I?\r\n> Really?\r\n\r\n-- \r\nAnna\r\n"
    )
    message = read(data)
    assert message is not None
    assert (message.text, message.sender, message.thread) == ("Yes, please.", ANNA, "<0@x>")
    assert read(b"\xff\xfe broken") is None


async def test_attachments_go_into_the_workspace_up_to_their_limit(mail: MailNetwork, tmp_path: Path) -> None:
    mail.settings["media_mb"] = 2
    says = Says("thanks")
    files = [("the beans.txt", b"ripe"), ("../../canary.bin", b"x" * 1_500_000), ("huge.bin", b"x" * 2_100_000)]
    async with running(mail.settings, tmp_path, says):
        await mail.attach(ANNA, files, "Look at these.")
        await until(lambda: mail.mails)
    saved = await asyncio.to_thread(lambda: {one.name.partition("-")[2][13:]: one for one in uploads_in(tmp_path)})
    assert sorted(saved) == ["canary.bin", "the-beans.txt"]
    assert await asyncio.to_thread(saved["the-beans.txt"].read_bytes) == b"ripe"
    assert await asyncio.to_thread(lambda: saved["canary.bin"].stat().st_size) == 1_500_000
    assert says.asked == [
        "Look at these.\n\n[huge.bin is larger than 2 MB, and was not taken.]"
        f"\n[attachment: {saved['the-beans.txt']}]\n[attachment: {saved['canary.bin']}]"
    ]


@pytest.mark.parametrize(
    "forged",
    [
        {"From": "eve@example.net", "Authentication_Results": "mx.home.test; dkim=pass header.d=example.net"},
        {"Authentication_Results": "mx.home.test; dkim=fail header.d=example.org"},
    ],
)
async def test_a_strangers_attachment_is_neither_read_nor_kept(
    mail: MailNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forged: dict[str, str]
) -> None:
    read: list[int] = []
    fetch_one = email._fetch_one

    def counted(server: Any, uid: int, most: int) -> email.Mail:
        read.append(most)
        return fetch_one(server, uid, most)

    monkeypatch.setattr(email, "_fetch_one", counted)
    async with running(mail.settings, tmp_path, Says("hello")):
        await mail.attach(ANNA, [("canary.bin", b"x" * 1_500_000)], "first", **forged)
        await mail.attach(BERT, [("notes.txt", b"y" * 1_500_000)], "second")
        await until(lambda: mail.mails)
    assert [one["To"] for one in mail.mails] == [BERT]
    assert [one.name[-9:] for one in await asyncio.to_thread(uploads_in, tmp_path)] == ["notes.txt"]
    assert read == [email.MAX_HEAD, email.MAX_HEAD, email.MAX_MAIL]


async def test_a_mail_over_the_limit_is_answered_without_its_files(
    mail: MailNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(email, "MAX_MAIL", 1_200_000)
    says = Says("thanks")
    async with running(mail.settings, tmp_path, says):
        await mail.attach(ANNA, [("huge.bin", b"x" * 1_500_000)], "Look.")
        await until(lambda: mail.mails)
    assert says.asked == ["Look.\n\n[The mail is too large: what is attached to it was not taken.]"]
    assert await asyncio.to_thread(uploads_in, tmp_path) == []


def test_inline_pictures_and_attached_mails_are_files_and_signatures_are_not() -> None:
    data = (
        b"From: Anna <anna@example.org>\r\nMessage-ID: <1@x>\r\nMIME-Version: 1.0\r\n"
        b"Content-Type: multipart/mixed; boundary=A\r\n\r\n"
        b"--A\r\nContent-Type: multipart/related; boundary=B\r\n\r\n"
        b"--B\r\nContent-Type: multipart/alternative; boundary=C\r\n\r\n"
        b"--C\r\nContent-Type: text/plain\r\n\r\nhello\r\n"
        b"--C\r\nContent-Type: text/html\r\n\r\n<p>hello</p>\r\n--C--\r\n"
        b"--B\r\nContent-Type: image/png\r\nContent-Transfer-Encoding: base64\r\n\r\niVBO\r\n--B--\r\n"
        b"--A\r\nContent-Type: message/rfc822\r\n\r\nSubject: within\r\n\r\ndeep\r\n"
        b"--A\r\nContent-Type: text/plain; name*=UTF-8''b%C3%BCcher.txt\r\n\r\nbooks\r\n"
        b"--A\r\nContent-Type: application/pgp-signature; name=signature.asc\r\n\r\nxyz\r\n--A--\r\n"
    )
    message = read(data)
    assert message is not None
    assert message.text == "hello"
    assert [(one.name, one.size) for one in message.files] == [("file.png", 3), ("file.eml", 21), ("bücher.txt", 5)]


def uploads_in(folder: Path) -> list[Path]:
    return sorted((folder / "uploads").iterdir()) if (folder / "uploads").exists() else []


@pytest.mark.parametrize(
    ("headers", "sender"),
    [
        ('From: "anna@example.org" <eve@example.org>', "eve@example.org"),
        ("From: =?utf-8?q?anna=40example.org?= <eve@example.org>", "eve@example.org"),
        ("From: =?utf-8?q?x_=3Canna=40example.org=3E_=28?= <eve@example.org>", "eve@example.org"),
        ("From: Doe, Anna (at home) <Anna@Example.org>", ANNA),
        ("From: anna@example.org <anna@example.org>", ANNA),
        ("From: anna@example.org)<eve@example.org>", None),
        ("From: <anna@example.org> <eve@example.org>", None),
        ("From: anna@example.org\r\nFrom: eve@example.org", None),
        ("From: anna@example.org, eve@example.org", None),
        ("From: =?utf-8?q?anna=40example.org?=@example.org", None),
        ("From: \u212aate@example.org", "\u212aate@example.org"),  # the Kelvin sign, whose lower case is a k
    ],
)
def test_a_sender_is_never_mistaken_for_another(headers: str, sender: str | None) -> None:
    """Both belong to the domain that the server has verified, as at every large provider."""
    verdict = "Authentication-Results: mx.home.test; dkim=pass header.d=example.org\r\n"
    message = read(f"{verdict}{headers}\r\n\r\nhello".encode(), "mx.home.test")
    assert (None if message is None else message.sender) == sender


NESTED = b"".join(b"--b%d\r\nContent-Type: multipart/mixed; boundary=b%d\r\n\r\n" % (n, n + 1) for n in range(9000))
BOMBS = {
    "nested": b"Content-Type: multipart/mixed; boundary=b0\r\n\r\n" + NESTED,
    "many parts": b"Content-Type: multipart/mixed; boundary=A\r\n\r\n" + b"--A\r\n\r\nx\r\n" * 80_000,
    "many parts, other line ends": b"Content-Type: multipart/mixed; boundary=A\r\n\r\n" + b"--A\r\rx\r" * 80_000,
    "parameters": b"Content-Type: text/plain; " + b"a*0*=x;" * 130_000,
    "references": b"References: " + b"<a@b> " * 150_000,
    "subject": b"Subject: " + b"=?utf-8?q?a?= " * 60_000,
    "recipients": b"To: " + b"a@b, " * 180_000,
    "tags": b"Content-Type: text/html\r\n\r\n" + b"<" * 900_000,
    "charset": b"Content-Type: text/plain; charset=punycode\r\n\r\n" + b"a" * 900_000,
}


async def test_mails_designed_to_keep_the_parser_busy_delay_no_other(mail: MailNetwork, tmp_path: Path) -> None:
    """The standard library's parser would take minutes for each, or fail repeatedly."""
    says = Says("ok")
    head = f"Authentication-Results: {VERDICT}\r\nFrom: {ANNA}\r\nMIME-Version: 1.0\r\n".encode()
    for data in BOMBS.values():
        await mail.deliver(head + data)
    async with running(mail.settings, tmp_path, says):
        await mail.say(BERT, "hello")
        await until(lambda: mail.heard(BERT))
    assert "hello" in says.asked
    assert max(map(len, says.asked)) < 500_000


async def test_only_the_headers_of_a_strangers_mail_are_parsed(
    mail: MailNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []
    parse = email.parsed

    def noted(data: bytes) -> Any:
        parsed.append(data)
        return parse(data)

    monkeypatch.setattr(email, "parsed", noted)
    async with running(mail.settings, tmp_path):
        verdict = "mx.home.test; dkim=pass header.d=example.net"
        await mail.say("eve@example.net", "canary", Authentication_Results=verdict)
        await mail.say(ANNA, "hello")
        await until(lambda: mail.heard(ANNA))
    assert len(parsed) == 1
    assert b"canary" not in parsed[0]


async def test_no_part_of_a_mail_becomes_a_header_of_the_answer(mail: MailNetwork, tmp_path: Path) -> None:
    injected = "=?utf-8?q?x=0D=0ABcc=3A_canary=40evil.test=0D=0A=0D=0Abody?="
    twice = "=?utf-8?q?=3D=3Futf-8=3Fq=3Fx=3D0D=3D0ABcc=3D3A_canary=3D40evil.test=3F=3D?="
    headers = {"Subject": f"{injected} {twice}", "Message_ID": f"<a{injected}@x>", "References": f"{injected} <b@x>"}
    async with running(mail.settings, tmp_path, Says("ok")):
        await mail.say(ANNA, "hi", From=f"{injected} <{ANNA}>", **headers)
        await until(lambda: mail.mails)
    (answer,) = mail.mails
    expected = "Subject From To Date Message-ID Auto-Submitted In-Reply-To References MIME-Version Content-Type"
    assert {*answer.keys()} <= {*expected.split()}
    assert mail.recipients == [[ANNA]]
    assert "canary@evil.test" not in str(answer["References"])


async def test_the_references_of_an_answer_reach_the_client_unchanged() -> None:
    """Even an id longer than a line should be: an encoded one would belong to no thread."""
    options = {"address": AGENT, "password": "x", "imap_host": "a", "smtp_host": "a", "auth_server": "none"}
    channel = await asyncio.to_thread(Email, Options("email", options, {}))
    long, other = f"<{'a' * 200}@x>", f"<{'b' * 200}@x>"
    extra = {"message_id": long, "references": " ".join([other] * 19)}
    made = channel._message(Part(chat=ANNA, text="ok", plain="ok", extra=extra), "key").as_bytes()
    lines = made.partition(b"\n\n")[0].decode().split("\n")
    assert f"In-Reply-To: {long}" in lines
    assert "=?utf-8?" not in "".join(lines)
    assert max(map(len, lines)) < 998
    hidden = "=?utf-8?q?a=0D=0ABcc=3A_canary?="
    broken = {"message_id": "<a@x>\r\nBcc: canary", "references": f"x\ny <{hidden}>", "subject": f"a\r\nBcc: b{hidden}"}
    file = OutgoingFile(f"{hidden}.txt", "text/plain", b"x")
    made = channel._message(Part(chat=ANNA, text="ok", plain="ok", extra=broken, files=(file,)), "key").as_bytes()
    assert b"\nBcc" not in made
    for chat in (f"{hidden}@x", "a@x\r\nBcc: b@x", "a@x,b@x", "a", "", "a@x b@x", '"a b"@x'):
        with pytest.raises(Never, match="not an e-mail address"):
            channel._message(Part(chat=chat, text="ok", plain="ok"), "key")


async def test_a_mail_that_arrives_when_the_channel_starts_to_wait_is_answered_at_once(
    mail: MailNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server announces it with the response to the last search, with the response to IDLE, or in the same bytes."""
    idle, has_new = email._idle, email._has_new
    began: list[str] = []

    def deliver(text: str) -> None:
        began.append(text)
        mail.put(mail.written(ANNA, text))

    def idle_late(server: Any, seconds: float) -> bool:
        if len(began) == 1:  # between the search and IDLE
            deliver("before IDLE")
            assert server.noop()[0] == "OK"  # the server announces it now, in response to a command other than IDLE
        return idle(server, seconds)

    def search_late(server: Any, last: int) -> bool:
        found = has_new(server, last)
        if not found and not began:
            deliver("after the search")
        return found

    monkeypatch.setattr(email, "_idle", idle_late)
    monkeypatch.setattr(email, "_has_new", search_late)
    async with running(mail.settings, tmp_path):
        async with asyncio.timeout(30):
            await until(lambda: len(mail.heard(ANNA)) == 2)
    assert mail.heard(ANNA) == ["re: after the search", "re: before IDLE"]


async def test_a_mail_that_arrives_in_the_tick_of_the_servers_check_is_answered_soon(
    mail: MailNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server detects new mail by the modification time of its folder, which has not changed."""
    has_new, came = email._has_new, threading.Event()
    new = mail.folder / "new"

    def search_late(server: Any, last: int) -> bool:
        found = has_new(server, last)
        if not found and not came.is_set():
            came.set()
            before = new.stat().st_mtime_ns
            mail.put(mail.written(ANNA, "in the same tick"))
            os.utime(new, ns=(before, before))
        return found

    monkeypatch.setattr(email, "_has_new", search_late)
    async with running(mail.settings, tmp_path):
        await until(lambda: mail.heard(ANNA))
    assert mail.heard(ANNA) == ["re: in the same tick"]


@pytest.mark.parametrize(
    "told", [b"* 2 EXISTS\r\n+ idling\r\n", b"+ idling\r\n* 2 EXISTS\r\n"], ids=["before", "in the same bytes"]
)
def test_an_announcement_that_arrives_as_waiting_begins_ends_it(told: bytes) -> None:
    """Buffered data is handled before waiting: nothing more would arrive for half an hour."""

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            connection.sendall(b"* PREAUTH [CAPABILITY IMAP4rev1 IDLE] hello\r\n")
            for line in lines:
                tag, command = line.split()[0], line.split()[-1]
                if command == b"IDLE":
                    connection.sendall(told)
                    idle_tag = tag
                elif command == b"DONE":
                    connection.sendall(idle_tag + b" OK done\r\n")
                elif command == b"CAPABILITY":
                    connection.sendall(b"* CAPABILITY IMAP4rev1 IDLE\r\n" + tag + b" OK done\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        host, port = listener.getsockname()
        server = imaplib.IMAP4(host, port, timeout=20)
        waiting = threading.Thread(target=email._idle, args=(server, 60.0), daemon=True)
        waiting.start()
        waiting.join(20)
        assert not waiting.is_alive()
        server.shutdown()


@pytest.mark.parametrize("tls", ["implicit", "starttls"])
async def test_both_servers_are_used_over_tls_and_their_certificates_are_checked(
    tls: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ca = Path(__file__).parents[1] / "certificates" / "ca.pem"
    async with MailNetwork(tls=tls).running() as mail:
        for folder in ("wrong", "right"):
            (tmp_path / folder).mkdir()
        async with running(mail.settings, tmp_path / "wrong") as store:
            state = await found(lambda: store.channel_state("email"))
            assert "certificate verify failed" in state["status"]
        caplog.clear()
        mail.settings["ca_file"] = str(ca)
        async with running(mail.settings, tmp_path / "right"):
            await mail.say(ANNA, "one")
            await until(lambda: len(mail.heard(ANNA)) == 1)
            await mail.say(ANNA, "two")  # it arrives during IDLE
            await until(lambda: len(mail.heard(ANNA)) == 2)
    assert mail.heard(ANNA) == ["re: one", "re: two"]
    assert "channel email" not in caplog.text  # the connection was kept


def test_a_temporarily_refused_mail_is_retried_and_a_permanently_refused_one_is_not() -> None:
    assert isinstance(email._refusal(451, b"greylisted"), Later)
    assert isinstance(email._refusal(550, b"no such user"), Never)
