"""A real IMAP server (dovecot), an SMTP server that keeps what it receives, and a person with a mailbox."""

from __future__ import annotations

import asyncio
import grp
import mimetypes
import os
import pwd
import shutil
import ssl
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest

from .hooks import free_port, server_process

DOVECOT = shutil.which("dovecot", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
AGENT = "agent@home.test"
PASSWORD = "the-mailbox-secret"
CERTIFICATE, KEY = (Path(__file__).parents[1] / "certificates" / f"localhost.{kind}" for kind in ("pem", "key"))
VERDICT = "mx.home.test; dkim=pass header.d=example.org; spf=pass smtp.mailfrom=example.org"
CONFIG = """
base_dir = {folder}/run
state_dir = {folder}/state
log_path = /dev/stderr
protocols = imap
listen = 127.0.0.1
{tls}
disable_plaintext_auth = no
auth_mechanisms = plain login
mail_location = maildir:{folder}/mail
first_valid_uid = 1
default_internal_user = {user}
default_internal_group = {group}
default_login_user = {user}
mailbox_list_index = no
passdb {{
  driver = static
  args = password={password}
}}
userdb {{
  driver = static
  args = uid={uid} gid={gid} home={folder}/home
}}
service imap-login {{
  chroot =
  inet_listener imap {{
    port = {plain_port}
  }}
  inet_listener imaps {{
    port = {tls_port}
    ssl = yes
  }}
}}
service anvil {{
  chroot =
}}
service stats {{
  chroot =
}}
"""


def _context() -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(CERTIFICATE, KEY)
    return made


class MailNetwork:
    """The agent's mailbox, and a person who writes to it and gets its answers."""

    def __init__(self, *, people: Sequence[str] = ("anna@example.org", "bert@example.org"), tls: str = "none") -> None:
        """`tls` is what both servers use: "implicit", "starttls" or "none"."""
        self._people = list(people)
        self._tls = tls
        self.settings: dict[str, Any] = {}
        self.mails: list[EmailMessage] = []  # sent by the agent
        self.uploads: list[tuple[str, str, str, bytes]] = []  # recipient, kind, name and content of files
        self.refuse: list[bytes] = []  # responses to RCPT before it is accepted
        self.recipients: list[list[str]] = []  # of each, as named by the client
        self.lose = 0  # mails that are accepted without a response
        self._folder = Path()
        self._number = self._files = 0
        self._heard: defaultdict[str, list[str]] = defaultdict(list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[MailNetwork]:
        if DOVECOT is None:
            pytest.skip("needs dovecot (scripts/system.sh dev)")
        self._folder = Path(tempfile.mkdtemp(prefix="imap"))
        user = pwd.getpwuid(os.getuid() or pwd.getpwnam("nobody").pw_uid)
        group = grp.getgrgid(user.pw_gid).gr_name
        for name in ("new", "cur", "tmp"):
            (self._folder / "mail" / name).mkdir(parents=True)
        port = free_port()
        is_implicit = self._tls == "implicit"
        (self._folder / "dovecot.conf").write_text(
            CONFIG.format(
                folder=self._folder,
                plain_port=0 if is_implicit else port,
                tls_port=port if is_implicit else 0,
                tls="ssl = no" if self._tls == "none" else f"ssl = yes\nssl_cert = <{CERTIFICATE}\nssl_key = <{KEY}",
                user=user.pw_name,
                group=group,
                uid=user.pw_uid,
                gid=user.pw_gid,
                password=PASSWORD,
            )
        )
        if os.getuid() == 0:
            for path in (self._folder, *self._folder.rglob("*")):
                os.chown(path, user.pw_uid, user.pw_gid)
        smtp = await asyncio.start_server(
            self._serve_smtp, "127.0.0.1", 0, limit=2**22, ssl=_context() if is_implicit else None
        )
        self.settings = {
            "name": "email",
            "address": AGENT,
            "password": PASSWORD,
            "imap_host": "127.0.0.1" if self._tls == "none" else "localhost",
            "imap_port": port,
            "imap_tls": self._tls,
            "smtp_host": "127.0.0.1" if self._tls == "none" else "localhost",
            "smtp_port": smtp.sockets[0].getsockname()[1],
            "smtp_tls": self._tls,
            "auth_server": "mx.home.test",
            "allow": self._people,
            "start": "all",
        }
        command = (DOVECOT, "-F", "-c", str(self._folder / "dovecot.conf"))
        async with server_process(*command, port=port, folder=self._folder), smtp:
            yield self

    @property
    def folder(self) -> Path:
        """Return the maildir."""
        return self._folder / "mail"

    async def say(self, chat: str, text: str, **headers: str) -> None:
        await self.attach(chat, [], text, **headers)

    async def attach(self, chat: str, files: Sequence[tuple[str, bytes]], text: str, **headers: str) -> None:
        """A person sends files."""
        await self.deliver(self.written(chat, text, files, **headers))

    def written(self, chat: str, text: str, files: Sequence[tuple[str, bytes]] = (), **headers: str) -> bytes:
        """A mail from a person, with exactly these headers."""
        mail = EmailMessage()
        self._number += 1
        given = {
            "Authentication-Results": VERDICT,
            "From": f"Someone <{chat}>",
            "To": AGENT,
            "Message-ID": f"<m{self._number}@example.org>",
            "References": f"<root-{chat}>",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        mail.set_content(text)
        for name, data in files:
            kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
            mail.add_attachment(data, *kind.split("/"), filename=name)
        return "".join(f"{name}: {value}\r\n" for name, value in given.items() if value).encode() + mail.as_bytes()

    async def deliver(self, data: bytes) -> None:
        """Deliver a mail unchanged."""
        await asyncio.to_thread(self.put, data)

    def put(self, data: bytes) -> None:
        self._files += 1
        path = self._folder / "mail" / "tmp" / f"{self._files}.mail"
        path.write_bytes(data)
        if os.getuid() == 0:
            os.chown(path, *self._owner())
        path.rename(self._folder / "mail" / "new" / path.name)

    def _owner(self) -> tuple[int, int]:
        found = os.stat(self._folder)
        return found.st_uid, found.st_gid

    def heard(self, chat: str) -> list[str]:
        return self._heard[chat]

    async def disturb(self) -> None:
        """Drop all connections, as when their process dies."""

    async def _serve_smtp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 smtp.test ESMTP\r\n")
        while line := await reader.readline():
            match line.split()[0].upper() if line.split() else b"":
                case b"EHLO" if self._tls == "starttls" and writer.get_extra_info("sslcontext") is None:
                    writer.write(b"250-smtp.test\r\n250 STARTTLS\r\n")
                case b"STARTTLS":
                    writer.write(b"220 go on\r\n")
                    await writer.drain()
                    await writer.start_tls(_context())
                    continue
                case b"EHLO":
                    writer.write(b"250-smtp.test\r\n250 AUTH PLAIN\r\n")
                case b"AUTH":
                    writer.write(b"235 2.7.0 ok\r\n")
                case b"MAIL":
                    self.recipients.append([])
                    writer.write(b"250 ok\r\n")
                case b"RCPT" if not self.refuse:
                    self.recipients[-1].append(line.decode().partition("<")[2].partition(">")[0])
                    writer.write(b"250 ok\r\n")
                case b"RCPT":
                    writer.write(self.refuse.pop(0) + b"\r\n")
                case b"DATA":
                    writer.write(b"354 go on\r\n")
                    data = (await reader.readuntil(b"\r\n.\r\n"))[:-5].replace(b"\r\n..", b"\r\n.")
                    self._keep(message_from_bytes(data, policy=policy.default))
                    if self.lose:
                        self.lose -= 1
                        break
                    writer.write(b"250 2.0.0 taken\r\n")
                case b"QUIT":
                    writer.write(b"221 bye\r\n")
                    break
                case _:
                    writer.write(b"250 ok\r\n")
            await writer.drain()
        writer.close()

    def _keep(self, mail: EmailMessage) -> None:
        self.mails.append(mail)
        body = mail.get_body(("plain",))
        assert body is not None
        to, text = str(mail["To"]), str(body.get_content()).strip()
        self._heard[to].append(text)
        for one in mail.iter_attachments():
            name, data = str(one.get_filename()), one.get_content()
            self.uploads.append((to, "file", name, data if isinstance(data, bytes) else data.encode()))
