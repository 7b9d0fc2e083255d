"""E-mail, against a real IMAP server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

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
    message = received(data, AGENT, "none", "f")
    assert message is not None
    assert (message.text, message.sender, message.thread) == ("Yes, please.", ANNA, "<0@x>")
    assert received(b"\xff\xfe broken", AGENT, "none", "f") is None
