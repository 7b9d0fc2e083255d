"""E-mail, against a real IMAP server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from everloop.channels import email
from everloop.channels.email import received
from everloop.channels.text import MARK
from everloop.testing.channels import conform, running

from .mail import AGENT, PASSWORD, MailNetwork
from .says import Says, found, until

ANNA, BERT = "anna@example.org", "bert@example.org"


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
        await until(lambda: len(mail.mails) == 2)  # which came while it waited in IDLE
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


@pytest.mark.parametrize(
    "headers",
    [
        {"Auto_Submitted": "auto-replied"},
        {"Precedence": "bulk"},
        {"List_Id": "<garden.example.org>"},
        {"Return_Path": "<>"},
        {"Authentication_Results": "mx.home.test; dkim=fail header.d=example.org"},
        {"Authentication_Results": "mx.evil.test; dkim=pass header.d=example.org"},
        {"Authentication_Results": "mx.home.test; dkim=pass header.d=evil.test"},
        {"Authentication_Results": 'mx.home.test; spf=pass smtp.mailfrom="x; dmarc=pass header.from=example.org"@e.t'},
        {"Authentication_Results": ""},
        {"From": "eve@example.net"},
        {"From": f"{ANNA}, eve@example.net"},
    ],
)
async def test_automatic_forged_and_strange_mails_are_not_answered(
    mail: MailNetwork, tmp_path: Path, headers: dict[str, str]
) -> None:
    says = Says("hello")
    async with running(mail.settings, tmp_path, says):
        await mail.say(ANNA, "first", **headers)
        await mail.say(BERT, "second")
        await until(lambda: mail.mails)
    assert says.asked == ["second"]
    assert [one["To"] for one in mail.mails] == [BERT]


async def test_a_mail_that_may_have_been_sent_comes_again_under_its_id_and_marked(
    mail: MailNetwork, tmp_path: Path
) -> None:
    mail.lose = 1
    async with running(mail.settings, tmp_path):
        await mail.say(ANNA, "hi")
        await until(lambda: len(mail.mails) == 2)
    assert mail.heard(ANNA) == ["re: hi", f"{MARK} re: hi"]
    assert mail.mails[0]["Message-ID"] == mail.mails[1]["Message-ID"]


async def test_an_address_that_is_refused_makes_a_dead_letter(mail: MailNetwork, tmp_path: Path) -> None:
    mail.refuse = [b"550 5.1.1 no such user"]
    async with running(mail.settings, tmp_path) as store:
        await mail.say(ANNA, "hi")
        (dead,) = await found(lambda: store.dead_letters("email"))
    assert dead.reason == "SMTP 550: 5.1.1 no such user"


async def test_a_wrong_password_is_told_without_it(mail: MailNetwork, tmp_path: Path) -> None:
    mail.settings["password"] = f"not-{PASSWORD}"
    async with running(mail.settings, tmp_path) as store:
        state = await found(lambda: store.channel_state("email"))
    assert "IMAP" in state["status"]
    assert PASSWORD not in str(state)


def test_what_is_quoted_and_signed_is_left_out() -> None:
    data = (
        b"From: Anna <anna@example.org>\r\nMessage-ID: <1@x>\r\nSubject: x\r\nIn-Reply-To: <0@x>\r\n\r\n"
        b"Yes, please.\r\n\r\nOn Monday, Agent wrote:\r\n> Shall I?\r\n> Really?\r\n\r\n-- \r\nAnna\r\n"
    )
    message = received(data, len(data), own=AGENT, auth_server="none", fallback="f")
    assert message is not None
    assert (message.text, message.sender, message.thread) == ("Yes, please.", ANNA, "<0@x>")
    assert received(b"\xff\xfe broken", 9, own=AGENT, auth_server="none", fallback="f") is None


async def test_attachments_come_into_the_workspace_within_their_size(mail: MailNetwork, tmp_path: Path) -> None:
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
async def test_an_attachment_of_a_stranger_is_neither_read_nor_kept(
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
    assert read == [email.LARGEST_HEAD, email.LARGEST_HEAD, email.LARGEST]


async def test_a_mail_that_is_too_large_is_answered_without_its_files(
    mail: MailNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(email, "LARGEST", 1_200_000)
    says = Says("thanks")
    async with running(mail.settings, tmp_path, says):
        await mail.attach(ANNA, [("huge.bin", b"x" * 1_500_000)], "Look.")
        await until(lambda: mail.mails)
    assert says.asked == ["Look.\n\n[The mail is too large: what is attached to it was not taken.]"]
    assert await asyncio.to_thread(uploads_in, tmp_path) == []


def test_pictures_in_the_text_and_attached_mails_are_files_and_signatures_are_not() -> None:
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
    message = received(data, len(data), own=AGENT, auth_server="none", fallback="f")
    assert message is not None
    assert message.text == "hello"
    assert [(one.name, one.size) for one in message.files] == [("file.png", 3), ("file.eml", 21), ("bücher.txt", 5)]


def uploads_in(folder: Path) -> list[Path]:
    return sorted((folder / "uploads").iterdir()) if (folder / "uploads").exists() else []
