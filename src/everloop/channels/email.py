"""E-mail: IMAP with IDLE in, SMTP out, by the standard library in threads.

A mail's own Message-ID makes sure that it is taken once. The cursor, the last UID, moves only when the mail is on disk.
A mail can name any sender, so the receiving server's verdict on SPF, DKIM or DMARC decides whether the sender counts.
"""

from __future__ import annotations

import contextlib
import imaplib
import mimetypes
import re
import select
import smtplib
import socket
import ssl
from email import message_from_bytes, policy
from email.message import EmailMessage
from email.utils import formatdate, getaddresses, parseaddr
from functools import partial
from html.parser import HTMLParser
from typing import Any, NamedTuple, TypeVar

from ..text import one_line
from ..threads import in_thread
from .base import Attachment, Can, Inbox, Later, Never, Options, Part, Received

CONNECT_SECONDS = 30.0
IDLE_SECONDS = 25 * 60.0  # servers end an IDLE after half an hour
LARGEST_HEAD = 1_000_000  # bytes of every mail that are read: what is behind them is mostly attachments
LARGEST = 36_000_000  # bytes of a mail that are read if its sender is known
LARGEST_ATTACHED = 18_000_000  # bytes of files in a mail: many servers take mails of 25 MB, in which files are longer
AT_ONCE = 50
SUBJECT = "A message"
NOBODY = re.compile(r"^(mailer-daemon|postmaster|no-?reply|do-?not-?reply|bounces?)([+._-].*)?@", re.I)
TLS = ("implicit", "starttls", "none")
T = TypeVar("T")


class Connection:
    """A connection that one thread opens and another may close, also before it is open."""

    def __init__(self) -> None:
        self._server: imaplib.IMAP4 | None = None
        self._is_closed = False

    def open(self, server: imaplib.IMAP4) -> None:
        self._server = server
        if self._is_closed:
            self.close()

    def close(self) -> None:
        self._is_closed = True
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.socket().shutdown(socket.SHUT_RDWR)  # ends a thread that waits in IDLE
            with contextlib.suppress(OSError, imaplib.IMAP4.error):
                self._server.shutdown()


class Email:
    """A mailbox."""

    can = Can(text=100_000, form="html", repeats="none", threads=True, media=LARGEST_ATTACHED, attaches=True)

    def __init__(self, options: Options) -> None:
        self.name = options.name
        self._address = options.text("address")
        self._user = options.text("user", self._address)
        self._password = options.secret("password")
        self._imap = (options.text("imap_host"), options.number("imap_port", 993))
        self._imap_tls = options.text("imap_tls", "implicit", choices=TLS)
        self._smtp = (options.text("smtp_host"), options.number("smtp_port", 465))
        self._smtp_tls = options.text("smtp_tls", "implicit", choices=TLS)
        self._ca_file = options.text("ca_file", "")
        self._mailbox = options.text("mailbox", "INBOX")
        self._start = options.text("start", "new", choices=("new", "all"))
        self._auth_server = options.text("auth_server").lower()
        if "@" not in self._address or not parseaddr(self._address)[1]:
            raise options.problem("address is not an e-mail address")

    # ------------------------------------------------------------------------------------------ receiving

    async def receive(self, inbox: Inbox) -> None:
        connection = Connection()
        try:
            server = await in_thread(self._log_in, connection)
            last = await self._begin(server, inbox)
            await inbox.ready()
            while True:
                for mail in await in_thread(_fetch, server, last[1]):
                    if (message := await self._received(mail, last[0], server, inbox)) is not None:
                        await inbox.accept(message)
                    last = (last[0], mail.uid)
                    await inbox.keep_cursor(f"{last[0]}:{mail.uid}")
                if not await in_thread(_has_new, server, last[1]):
                    await in_thread(_idle, server)
        except (imaplib.IMAP4.error, ssl.SSLError) as error:
            raise OSError(one_line(str(error), 200)) from None
        finally:
            connection.close()

    async def _received(self, mail: Mail, validity: int, server: imaplib.IMAP4, inbox: Inbox) -> Received | None:
        """The message that a mail is. A large one is read to its end only if its sender is known."""
        read = partial(received, own=self._address, auth_server=self._auth_server, fallback=f"{validity}:{mail.uid}")
        message = await in_thread(read, mail.data, mail.size)
        if message is None or mail.size <= len(mail.data) or not await inbox.knows(message.sender):
            return message
        return await in_thread(lambda: read(_fetch_one(server, mail.uid, LARGEST).data, mail.size))

    async def check(self) -> str:
        """Log in at both servers."""
        connection = Connection()
        try:
            await in_thread(self._log_in, connection)
        finally:
            connection.close()
        await in_thread(lambda: self._connect_smtp().close())
        return self._address

    def _context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self._ca_file or None)

    def _log_in(self, connection: Connection) -> imaplib.IMAP4:
        try:
            if self._imap_tls == "implicit":
                server: imaplib.IMAP4 = imaplib.IMAP4_SSL(
                    *self._imap, ssl_context=self._context(), timeout=CONNECT_SECONDS
                )
            else:
                server = imaplib.IMAP4(*self._imap, timeout=CONNECT_SECONDS)
            connection.open(server)
            if self._imap_tls == "starttls":
                server.starttls(self._context())
            server.login(self._user, self._password)
            status, data = server.select(_quoted(self._mailbox), readonly=True)
        except imaplib.IMAP4.error as error:
            raise OSError(f"IMAP: {one_line(str(error), 200)}") from None
        if status != "OK":
            raise Never(f"the mailbox {self._mailbox} cannot be opened: {one_line(str(data), 100)}")
        return server

    async def _begin(self, server: imaplib.IMAP4, inbox: Inbox) -> tuple[int, int]:
        """(UIDVALIDITY, last UID). A mailbox that is new, or was made anew, begins with the mails to come."""
        validity = _number(server, "UIDVALIDITY")
        kept = await inbox.cursor()
        if kept:
            known, _, uid = kept.partition(":")
            if int(known) == validity:
                return validity, int(uid)
        last = max(_number(server, "UIDNEXT") - 1, 0) if self._start == "new" else 0
        await inbox.keep_cursor(f"{validity}:{last}")
        return validity, last

    # ------------------------------------------------------------------------------------------ sending

    async def send(self, part: Part, key: str) -> str:
        message = self._message(part, key)
        await in_thread(self._send, message)
        return str(message["Message-ID"])

    def _send(self, message: EmailMessage) -> None:
        """Send a mail in this thread, which closes the connection even if its caller has gone."""
        try:
            server = self._connect_smtp()
        except (OSError, smtplib.SMTPException) as error:
            raise Later(10.0, f"SMTP: {one_line(str(error), 200)}") from None
        try:
            server.send_message(message)
        except smtplib.SMTPRecipientsRefused as error:
            code, reason = next(iter(error.recipients.values()))
            raise _refusal(code, reason) from None
        except smtplib.SMTPResponseException as error:
            raise _refusal(error.smtp_code, error.smtp_error) from None
        except smtplib.SMTPException as error:
            raise OSError(f"SMTP: {one_line(str(error), 200)}") from None
        finally:
            server.close()

    def _connect_smtp(self) -> smtplib.SMTP:
        domain = self._address.rpartition("@")[2]
        if self._smtp_tls == "implicit":
            server: smtplib.SMTP = smtplib.SMTP_SSL(
                *self._smtp, local_hostname=domain, timeout=CONNECT_SECONDS, context=self._context()
            )
        else:
            server = smtplib.SMTP(*self._smtp, local_hostname=domain, timeout=CONNECT_SECONDS)
            if self._smtp_tls == "starttls":
                server.starttls(context=self._context())
        try:
            server.ehlo_or_helo_if_needed()
            if server.has_extn("auth"):
                server.login(self._user, self._password)
        except BaseException:
            server.close()
            raise
        return server

    def _message(self, part: Part, key: str) -> EmailMessage:
        if not parseaddr(part.chat)[1] or re.search(r"[\s<>,;]", part.chat):
            raise Never("the chat is not an e-mail address")
        message = EmailMessage()
        subject = one_line(part.extra.get("subject", ""), 200)
        message["Subject"] = re.sub(r"^(re:\s*)*", "Re: ", subject, flags=re.I) if subject else SUBJECT
        message["From"], message["To"] = self._address, part.chat
        message["Date"] = formatdate(localtime=True)
        # The same on a repeat: many receivers show such a mail once.
        message["Message-ID"] = f"<{key}@{self._address.rpartition('@')[2]}>"
        message["Auto-Submitted"] = "auto-replied" if part.reply_to else "auto-generated"
        if answered := part.extra.get("message_id", ""):
            message["In-Reply-To"] = answered
            known = [one for one in part.extra.get("references", "").split() if one != answered][-20:]
            message["References"] = " ".join([*known, answered])
        message.set_content(part.plain)
        message.add_alternative(f'<div style="white-space: pre-wrap">{part.text}</div>', subtype="html")
        for file in part.files:
            kind, _, sort = file.type.partition("/")
            if kind in ("text", "message", "multipart"):  # as they are, whatever their characters and lines
                kind, sort = "application", "octet-stream"
            message.add_attachment(file.data, maintype=kind, subtype=sort, filename=file.name)
        return message

    async def show(self, chat: str, key: str, text: str) -> None:
        """Nothing is shown before the answer."""


def _refusal(code: int, reason: bytes | str) -> Exception:
    words = f"SMTP {code}: {one_line(reason, 200)}"
    return Later(60.0, words) if 400 <= code < 500 else Never(words)


# ---------------------------------------------------------------------------------------------------- the mailbox


def _quoted(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _number(server: imaplib.IMAP4, name: str) -> int:
    _, data = server.response(name)
    found = data[0] if data else None
    return int(found) if isinstance(found, bytes) else 0


def _uids(server: imaplib.IMAP4, last: int) -> list[int]:
    """The UIDs above the last one. A server answers with the highest one if there is none."""
    status, data = server.uid("SEARCH", f"UID {last + 1}:*")
    if status != "OK":
        raise OSError(f"IMAP: {one_line(str(data), 100)}")
    found = [int(uid) for line in data if line for uid in line.split()]
    return sorted(uid for uid in found if uid > last)


def _has_new(server: imaplib.IMAP4, last: int) -> bool:
    return bool(_uids(server, last))


class Mail(NamedTuple):
    """A mail of the mailbox, as far as it was read."""

    uid: int
    data: bytes
    size: int  # of the whole mail


def _fetch(server: imaplib.IMAP4, last: int) -> list[Mail]:
    """The next mails, oldest first."""
    return [_fetch_one(server, uid, LARGEST_HEAD) for uid in _uids(server, last)[:AT_ONCE]]


def _fetch_one(server: imaplib.IMAP4, uid: int, most: int) -> Mail:
    status, data = server.uid("FETCH", str(uid), f"(RFC822.SIZE BODY.PEEK[]<0.{most}>)")
    if status != "OK":
        raise OSError(f"IMAP: {one_line(str(data), 100)}")
    bodies = [part[1] for part in data if isinstance(part, tuple)]
    words = b" ".join(part[0] if isinstance(part, tuple) else part for part in data if part)
    size = re.search(rb"RFC822\.SIZE (\d+)", words)
    body = bodies[0] if bodies else b""
    return Mail(uid, body, int(size[1]) if size else len(body))


def _idle(server: imaplib.IMAP4) -> None:
    """Wait until the server says anything, or until the IDLE is to be renewed."""
    if "IDLE" not in server.capabilities:
        raise Never("the server has no IDLE")
    if server.untagged_responses.pop("EXISTS", None):  # told with the answer to an earlier command
        return
    tag = server._new_tag()
    server.send(tag + b" IDLE\r\n")
    line, told = server.readline(), False
    while line.startswith(b"* "):
        line, told = server.readline(), True
    if not line.startswith(b"+"):
        raise OSError(f"IMAP: {one_line(line, 100)}")
    if not told and not _has_unread(server):
        select.select([server.socket()], [], [], IDLE_SECONDS)
    server.send(b"DONE\r\n")
    while not (line := server.readline()).startswith(tag):
        if not line:
            raise OSError("the server closed the connection")


def _has_unread(server: imaplib.IMAP4) -> bool:
    """Whether bytes were received that nothing has read yet: they are in a buffer, where `select` does not see them."""
    file: Any = getattr(server, "_file", None) or server.file
    connection = server.socket()
    before = connection.gettimeout()
    connection.setblocking(False)
    try:
        return bool(file.peek(1))
    except ssl.SSLWantReadError:
        return False
    finally:
        connection.settimeout(before)


# ---------------------------------------------------------------------------------------------------- one mail


def received(data: bytes, size: int, *, own: str, auth_server: str, fallback: str) -> Received | None:
    """The message that a mail of this size is; None for what no person wrote, or what may not be from its sender."""
    mail = message_from_bytes(data, policy=policy.default)
    senders = [address for _, address in getaddresses([_header(mail, "From")]) if "@" in address]
    if len(senders) != 1 or _is_automatic(mail, senders[0]) or senders[0].lower() == own.lower():
        return None
    if auth_server != "none" and not is_authentic(mail, senders[0], auth_server):
        return None
    id = _header(mail, "Message-ID").strip() or fallback
    references = _header(mail, "References").split() or _header(mail, "In-Reply-To").split()
    subject = one_line(_header(mail, "Subject"), 200)
    text = body_of(mail)
    is_whole = size <= len(data)
    if not is_whole:
        text = f"{text}\n\n[The mail is too large: what is attached to it was not taken.]".strip()
    if subject and not references and not text.startswith("/"):
        text = f"Subject: {subject}\n\n{text}"
    extra = {
        "subject": subject,
        "message_id": id if id.startswith("<") else "",
        "references": " ".join(references[-20:]),
    }
    return Received(
        id=id[:250],
        chat=senders[0].lower(),
        sender=senders[0].lower(),
        name=parseaddr(_header(mail, "From"))[0],
        text=text,
        thread=(references[0] if references else id)[:200],
        extra=extra,
        files=tuple(attachments_of(mail)) if is_whole else (),
    )


def _header(mail: EmailMessage | object, name: str) -> str:
    try:
        value = mail[name]  # type: ignore[index]
    except Exception:  # a header that the standard library cannot read
        return ""
    return "" if value is None else str(value)


def _is_automatic(mail: object, sender: str) -> bool:
    """Whether a program wrote the mail: two programs must not answer each other for ever."""
    submitted = _header(mail, "Auto-Submitted").lower()
    bulk = _header(mail, "Precedence").lower() in ("bulk", "junk", "list", "auto_reply")
    lists = any(
        _header(mail, name) for name in ("List-Id", "List-Unsubscribe", "X-Autoreply", "X-Auto-Response-Suppress")
    )
    bounced = _header(mail, "Return-Path").strip() == "<>"
    return (submitted not in ("", "no")) or bulk or lists or bounced or NOBODY.match(sender) is not None


def is_authentic(mail: object, sender: str, auth_server: str) -> bool:
    """Whether the receiving server says that the mail is from its sender.

    Only its own verdict counts, which is the first of the headers: those below may be the sender's inventions.
    """
    headers = mail.get_all("Authentication-Results", [])  # type: ignore[attr-defined]
    # What is quoted may be the sender's: it must not be read as a result.
    verdict = re.sub(r"\"(?:[^\"\\]|\\.)*\"|\([^()]*\)", " ", str(headers[0])).lower() if headers else ""
    server, _, results = verdict.partition(";")
    if not server.split() or server.split()[0] != auth_server:
        return False
    domain = sender.rpartition("@")[2].lower()
    for result in results.split(";"):
        method = result.strip().split(" ")[0]
        if method == "dmarc=pass" and _aligned(_property(result, "header.from"), domain):
            return True
        if method == "dkim=pass":
            signer = _property(result, "header.d") or _property(result, "header.i").rpartition("@")[2]
            if _aligned(signer, domain):
                return True
        if method == "spf=pass" and _aligned(_property(result, "smtp.mailfrom").rpartition("@")[2], domain):
            return True
    return False


def _property(result: str, name: str) -> str:
    found = re.search(rf"(?<!\S){re.escape(name)}=(\S+)", result)
    return found[1] if found else ""


def _aligned(signer: str, domain: str) -> bool:
    """Whether a verified domain speaks for the sender's: the same, or one above it."""
    return bool(signer) and "." in signer and (signer == domain or domain.endswith(f".{signer}"))


def body_of(mail: object) -> str:
    """The words of a mail: without what it quotes and without the signature."""
    try:
        found = mail.get_body(("plain", "html"))  # type: ignore[attr-defined]
        text = str(found.get_content()) if found is not None else ""
        if found is not None and found.get_content_subtype() == "html":
            text = _text_of(text)
    except Exception:  # a mail that the standard library cannot read
        return ""
    return _without_quotes(text.replace("\r\n", "\n")).strip()


def attachments_of(mail: object) -> list[Attachment]:
    """The files of a mail: all that is neither a form of its text nor a signature, pictures in the text too."""
    found: list[Attachment] = []
    try:
        bodies = [mail.get_body((kind,)) for kind in ("plain", "html")]  # type: ignore[attr-defined]
        for part in _leaves(mail):
            if any(part is body for body in bodies) or part.get_content_subtype().endswith("-signature"):
                continue
            is_mail = part.get_content_type() == "message/rfc822"
            data = part.get_content().as_bytes() if is_mail else part.get_payload(decode=True)
            name = part.get_filename() or f"file{mimetypes.guess_extension(part.get_content_type()) or ''}"
            found.append(_attachment(str(name), data or b""))
    except Exception:  # a mail that the standard library cannot read
        return found
    return found


def _attachment(name: str, data: bytes) -> Attachment:
    async def read(limit: int) -> bytes:
        return data[: limit + 1]

    return Attachment(name, read, len(data))


def _leaves(part: Any) -> list[Any]:
    """The parts of a mail that have no parts; a mail within it is one."""
    if part.get_content_maintype() != "multipart":
        return [part]
    return [leaf for inner in part.iter_parts() for leaf in _leaves(inner)]


def _without_quotes(text: str) -> str:
    """The text above a quoted mail at the end, and above the signature."""
    text = re.split(r"^-- ?$", text, maxsplit=1, flags=re.M)[0]
    lines = text.rstrip().split("\n")
    end = len(lines)
    while end and (lines[end - 1].startswith(">") or not lines[end - 1].strip()):
        end -= 1
    if 0 < end < len(lines) and lines[end - 1].rstrip().endswith(":"):  # On Monday, Anna wrote:
        end -= 1
        if end and lines[end - 1].startswith("On "):
            end -= 1
    kept = "\n".join(lines[:end]).strip()
    return kept or text.strip()


class _Words(HTMLParser):
    """The text of an HTML mail."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._hidden += tag in ("style", "script", "head")
        if tag in ("br", "p", "div", "li", "tr", "blockquote"):
            self.words.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("style", "script", "head") and self._hidden > 0

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.words.append(data)


def _text_of(html: str) -> str:
    reader = _Words()
    reader.feed(html)
    return re.sub(r"\n{3,}", "\n\n", "".join(reader.words)).strip()
