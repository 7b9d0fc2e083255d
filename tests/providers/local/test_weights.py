"""Model files over HTTP: whatever a server does, a file gets its name only when it is complete and intact."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from everloop.errors import EverloopError
from everloop.providers.local import sources
from everloop.providers.local.catalogue import CATALOGUE, DEFAULT, ModelCard
from everloop.providers.local.progress import Progress, ProgressReporter
from everloop.providers.local.weights import Sources, Weights
from tests.support.places import CERTIFICATES

from .servers import BYTES, CARD, OTHER, Answer, Server, refused, serving

HUB, MIRROR = "/hub/tiny-q4.gguf", "/mirror/tiny-q4.gguf"


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PAUSES", (0.01, 0.01, 0.01))


def shelf(folder: Path, server: Server, *, weights: Path | None = None, mirror: bool = False) -> Weights:
    """A user's folder whose hub is the server, perhaps with a mirror."""
    card = replace(CARD, hub=f"{server.url}{HUB}")
    asked = Sources(weights, f"{server.url}/mirror" if mirror else "")
    return Weights(folder / "models", asked, {card.name: card})


def is_installed(path: Path) -> bool:
    return path.read_bytes() == BYTES and path.stat().st_mode & 0o777 == 0o644


def left(folder: Path) -> set[str]:
    """Return what is in the folder, except the lock and the record of the check."""
    return {path.name for path in (folder / "models").iterdir()} - {".tiny.lock", ".tiny.checked"}


# ---------------------------------------------------------------------------------------------- the good way


def test_a_model_is_pulled_once_and_then_found_without_the_network(tmp_path, server):
    server.gives(HUB, Answer(BYTES))
    weights = shelf(tmp_path, server)
    assert weights.find("tiny") is None
    assert is_installed(weights.pull("tiny"))
    assert weights.pull("tiny") == weights.find("tiny") == tmp_path / "models" / CARD.file
    assert len(server.requests) == 1
    assert left(tmp_path) == {CARD.file}


def test_reports_grow_to_the_full_size(tmp_path, server):
    server.gives(HUB, Answer(BYTES, slow=0.1))
    seen: list[Progress] = []
    shelf(tmp_path, server).pull("tiny", ProgressReporter(seen.append))
    done = [now.done for now in seen if now.stage == "download"]
    assert len(done) >= 3
    assert done == sorted(done)
    assert (done[-1], seen[-1].total) == (CARD.size, CARD.size)


async def test_ensure_pulls_outside_the_event_loop_and_reports_on_it(tmp_path, server):
    server.gives(HUB, Answer(BYTES))
    loops: list[asyncio.AbstractEventLoop] = []
    path = await shelf(tmp_path, server).ensure("tiny", lambda now: loops.append(asyncio.get_running_loop()))
    assert is_installed(path)
    assert set(loops) == {asyncio.get_running_loop()}


async def test_a_cancelled_ensure_stops_and_the_next_one_resumes(tmp_path, server):
    server.gives(HUB, Answer(BYTES, slow=0.3), Answer(BYTES))
    weights = shelf(tmp_path, server)
    begun = asyncio.Event()
    pulling = asyncio.create_task(weights.ensure("tiny", lambda now: begun.set() if now.done > 50_000 else None))
    await begun.wait()
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    assert 50_000 < await asyncio.to_thread(weights.downloaded_bytes, "tiny") < CARD.size
    assert is_installed(await weights.ensure("tiny"))
    assert server.ranges[0] is None
    assert int(server.ranges[1][6:-1]) > 50_000


def test_the_hub_may_redirect_to_another_host(tmp_path, server):
    with serving() as store:
        server.gives(HUB, Answer(status=302, location=f"http://localhost:{store.port}/blob"))
        store.gives("/blob", Answer(BYTES, cut=150_000), Answer(BYTES))
        assert is_installed(shelf(tmp_path, server).pull("tiny"))
        assert store.ranges == [None, "bytes=150000-"]


# ---------------------------------------------------------------------------------------------- cuts


def test_an_interrupted_download_resumes_where_it_ended(tmp_path, server):
    server.gives(HUB, Answer(BYTES, cut=100_000), Answer(BYTES, cut=60_000), Answer(BYTES))
    assert is_installed(shelf(tmp_path, server).pull("tiny"))
    assert server.ranges == [None, "bytes=100000-", "bytes=160000-"]
    assert server.sent == CARD.size
    assert server.requests[1][1]["If-Range"] == '"one"'


def test_a_server_that_cannot_resume_starts_over(tmp_path, server):
    server.gives(HUB, Answer(BYTES, cut=100_000, ranges=False), Answer(BYTES, ranges=False))
    assert is_installed(shelf(tmp_path, server).pull("tiny"))


def test_a_file_that_changed_on_the_server_is_not_joined_to_the_old_one(tmp_path, server):
    server.gives(HUB, Answer(OTHER, cut=250_000), Answer(BYTES, etag='"two"'))
    assert is_installed(shelf(tmp_path, server).pull("tiny"))
    assert [headers["If-Range"] for _, headers in server.requests] == [None, '"one"']


def test_a_server_that_lacks_the_range_is_asked_for_all_of_it(tmp_path, server):
    server.gives(HUB, Answer(BYTES, cut=100_000), Answer(status=416), Answer(BYTES))
    assert is_installed(shelf(tmp_path, server).pull("tiny"))
    assert server.ranges == [None, "bytes=100000-", None]


def test_a_weak_validator_does_not_count(tmp_path, server):
    server.gives(HUB, Answer(BYTES, cut=100_000, etag='W/"one"'), Answer(BYTES, etag='W/"one"'))
    assert is_installed(shelf(tmp_path, server).pull("tiny"))
    assert server.requests[1][1]["If-Range"] is None


def test_after_too_many_interruptions_the_server_is_abandoned_and_the_partial_file_kept(tmp_path, server):
    server.gives(HUB, Answer(BYTES, cut=1000))
    weights = shelf(tmp_path, server)
    refused(weights)
    assert len(server.requests) < 10
    assert 0 < weights.downloaded_bytes("tiny") < CARD.size
    server.gives(HUB, Answer(BYTES))
    assert is_installed(weights.pull("tiny"))


def test_the_next_source_resumes_where_the_first_one_ended(tmp_path, server):
    server.gives(MIRROR, Answer(BYTES, cut=100_000), Answer(status=404))
    server.gives(HUB, Answer(BYTES))
    assert is_installed(shelf(tmp_path, server, mirror=True).pull("tiny"))
    assert [(path, headers["Range"]) for path, headers in server.requests] == [
        (MIRROR, None), (MIRROR, "bytes=100000-"), (HUB, "bytes=100000-")
    ]  # fmt: skip
    assert server.requests[-1][1]["If-Range"] is None  # the mirror's version


def test_an_overloaded_server_is_asked_again(tmp_path, server):
    server.gives(HUB, Answer(status=503), Answer(status=429), Answer(BYTES))
    assert is_installed(shelf(tmp_path, server).pull("tiny"))


def test_a_complete_partial_file_needs_no_server(tmp_path, server):
    weights = shelf(tmp_path, server)
    weights.folder.mkdir()
    (weights.folder / f".{CARD.file}.part").write_bytes(BYTES)
    assert is_installed(weights.pull("tiny"))
    assert server.requests == []


@pytest.mark.parametrize("part", [OTHER, OTHER[:300_000], BYTES + b"more"], ids=["wrong", "wrong start", "too long"])
def test_a_partial_file_of_another_model_is_discarded(tmp_path, server, part):
    server.gives(HUB, Answer(BYTES))
    weights = shelf(tmp_path, server)
    weights.folder.mkdir()
    (weights.folder / f".{CARD.file}.part").write_bytes(part)
    assert is_installed(weights.pull("tiny"))


# ---------------------------------------------------------------------------------------------- bad bytes


def test_wrong_bytes_are_deleted_and_refused(tmp_path, server):
    server.gives(HUB, Answer(OTHER))
    weights = shelf(tmp_path, server)
    assert "127.0.0.1" in refused(weights)
    assert weights.downloaded_bytes("tiny") == 0
    assert len(server.requests) == 1


def test_a_mirror_with_wrong_bytes_is_skipped(tmp_path, server):
    server.gives(MIRROR, Answer(OTHER))
    server.gives(HUB, Answer(BYTES))
    assert is_installed(shelf(tmp_path, server, mirror=True).pull("tiny"))


def test_a_mirror_that_interrupts_wrong_bytes_does_not_spoil_the_hubs(tmp_path, server):
    server.gives(MIRROR, Answer(OTHER, cut=300_000), Answer(status=404))
    server.gives(HUB, Answer(BYTES))
    assert is_installed(shelf(tmp_path, server, mirror=True).pull("tiny"))
    assert server.ranges == [None, "bytes=300000-", "bytes=300000-", None]


@pytest.mark.parametrize(
    "answer",
    [
        Answer(b"<html>please log in</html>", kind="text/html"),
        Answer(BYTES + b"more"),
        Answer(BYTES, length=CARD.size - 1),
        Answer(BYTES, length=10**12, cut=CARD.size),
        Answer(BYTES, length=-5),
        Answer(status=204),
    ],
    ids=["a page", "too long", "a smaller header", "a huge header", "a header below zero", "nothing"],
)
def test_a_file_of_the_wrong_length_is_not_downloaded(tmp_path, server, answer):
    server.gives(HUB, answer)
    weights = shelf(tmp_path, server)
    refused(weights)
    assert weights.downloaded_bytes("tiny") == 0


@pytest.mark.parametrize("said", ["bytes 100000-100009/10", f"bytes 7-{CARD.size - 1}/{CARD.size}", "nonsense"])
def test_a_range_that_was_not_requested_is_refused_and_the_partial_file_kept(tmp_path, server, said):
    server.gives(HUB, Answer(BYTES, cut=100_000), Answer(BYTES, content_range=said))
    weights = shelf(tmp_path, server)
    refused(weights)
    assert weights.downloaded_bytes("tiny") == 100_000


def test_an_html_page_instead_of_the_rest_leaves_the_partial_file_intact(tmp_path, server):
    server.gives(HUB, Answer(BYTES, cut=100_000), Answer(b"<html>please log in</html>", kind="text/html"))
    weights = shelf(tmp_path, server)
    refused(weights)
    assert weights.downloaded_bytes("tiny") == 100_000


# ---------------------------------------------------------------------------------------------- all fail


def test_a_missing_file_leads_to_the_next_source(tmp_path, server):
    server.gives(HUB, Answer(BYTES))
    assert is_installed(shelf(tmp_path, server, mirror=True).pull("tiny"))
    assert [path for path, _ in server.requests] == [MIRROR, HUB]


def test_when_all_fail_one_line_names_each_source_and_why(tmp_path, server):
    server.gives(HUB, Answer(status=403))
    card = replace(CARD, hub=f"{server.url}{HUB}")
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(OTHER)
    weights = Weights(tmp_path / "models", Sources(mine, "http://localhost:1/models"), {"tiny": card})
    said = refused(weights)
    for part in (str(mine), "localhost", "refused", "127.0.0.1", "403", "EVERLOOP_WEIGHTS"):
        assert part in said
    assert mine.read_bytes() == OTHER


def test_a_host_that_drops_packets_does_not_delay_the_next_source(tmp_path, server, monkeypatch):
    monkeypatch.setattr(sources, "CONNECT_SECONDS", 0.5)
    server.gives(HUB, Answer(BYTES))
    with socket.socket() as silent, contextlib.ExitStack() as clients:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)  # and no accept: once its queue is full, the kernel stops answering
        for _ in range(4):
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(silent.getsockname())
        mirror = f"http://127.0.0.1:{silent.getsockname()[1]}/models"
        card = replace(CARD, hub=f"{server.url}{HUB}")
        began = time.monotonic()
        assert is_installed(Weights(tmp_path / "models", Sources(mirror=mirror), {"tiny": card}).pull("tiny"))
    assert 0.4 < time.monotonic() - began < 30  # the system itself would try for two minutes


@pytest.mark.parametrize(
    "mirror", ["file:///c4nary-pw", "ftp://me:c4nary-pw@127.0.0.1", "c4nary-pw", "http://[c4nary-pw"]
)
def test_a_mirror_that_is_not_a_url_is_an_error_that_does_not_show_it(tmp_path, mirror):
    assert "c4nary-pw" not in refused(Weights(tmp_path / "models", Sources(mirror=mirror), {"tiny": CARD}))


def test_a_link_in_place_of_the_partial_file_is_not_written_through(tmp_path, server):
    server.gives(HUB, Answer(BYTES))
    weights = shelf(tmp_path, server)
    weights.folder.mkdir()
    precious = tmp_path / "precious"
    precious.write_text("canary")
    (weights.folder / f".{CARD.file}.part").symlink_to(precious)
    refused(weights)
    assert precious.read_text() == "canary"


def test_a_mirrors_name_and_password_go_to_it_alone_and_are_never_shown(tmp_path, server):
    secret = "c4nary-pw"
    with serving() as elsewhere:
        server.gives(MIRROR, Answer(status=302, location=f"{elsewhere.url}/blob"))
        elsewhere.gives("/blob", Answer(OTHER))
        mirror = f"http://me:{secret}@127.0.0.1:{server.port}/mirror/"
        said = refused(Weights(tmp_path / "models", Sources(mirror=mirror), {"tiny": CARD}))
        sent = base64.b64encode(f"me:{secret}".encode()).decode()
        assert server.requests[0][1]["Authorization"] == f"Basic {sent}"
        assert all(secret not in str(headers) and sent not in str(headers) for _, headers in elsewhere.requests)
    assert secret not in said
    for path in (tmp_path / "models").iterdir():
        assert secret.encode() not in path.read_bytes()


def test_a_redirect_out_of_https_is_not_followed(tmp_path, server, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATES / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATES / "localhost.pem", CERTIFICATES / "localhost.key")
    server.gives("/blob", Answer(BYTES))
    with serving(context) as secure:
        secure.gives("/ok", Answer(BYTES))
        secure.gives("/away", Answer(status=302, location=f"{server.url}/blob"))
        url = f"https://localhost:{secure.port}"
        refused(Weights(tmp_path / "models", catalogue={"tiny": replace(CARD, hub=f"{url}/away")}))
        assert server.requests == []
        assert is_installed(
            Weights(tmp_path / "models", catalogue={"tiny": replace(CARD, hub=f"{url}/ok")}).pull("tiny")
        )


@pytest.mark.parametrize("place", ["file:///etc/passwd", "ftp://127.0.0.1:1/x"])
def test_a_redirect_to_another_scheme_is_not_followed(tmp_path, server, place):
    server.gives(HUB, Answer(status=302, location=place))
    weights = shelf(tmp_path, server)
    refused(weights)
    assert weights.downloaded_bytes("tiny") == 0


# ---------------------------------------------------------------------------------------------- files of the person


@pytest.mark.parametrize("name", ["named-otherwise.gguf", CARD.file])
def test_a_file_that_the_person_names_is_used_where_it_is(tmp_path, server, name):
    mine = tmp_path / "mine" / name
    mine.parent.mkdir()
    mine.write_bytes(BYTES)
    pointed = mine.parent if name == CARD.file else mine  # the folder suffices if the name is right
    weights = shelf(tmp_path, server, weights=pointed)
    assert weights.pull("tiny") == weights.find("tiny") == mine
    assert server.requests == []


def test_a_different_file_of_the_persons_is_left_alone_and_the_next_source_used(tmp_path, server):
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(OTHER)
    server.gives(HUB, Answer(BYTES))
    assert is_installed(shelf(tmp_path, server, weights=mine).pull("tiny"))
    assert mine.read_bytes() == OTHER


def test_a_checked_file_is_read_again_only_if_changed_or_on_demand(tmp_path, server):
    server.gives(HUB, Answer(BYTES))
    weights = shelf(tmp_path, server)
    path = weights.pull("tiny")
    changed = path.stat().st_mtime_ns
    path.write_bytes(OTHER)
    os.utime(path, ns=(changed, changed))
    assert weights.find("tiny") == path  # there is no sign that it differs
    assert weights.find("tiny", again=True) is None
    os.utime(path)
    assert weights.find("tiny") is None
    assert is_installed(weights.pull("tiny"))


def test_a_damaged_file_is_deleted_even_if_it_cannot_be_replaced(tmp_path, server):
    server.gives(HUB, Answer(BYTES), Answer(status=404))
    weights = shelf(tmp_path, server)
    weights.pull("tiny").write_bytes(OTHER)
    refused(weights)


def test_a_file_of_another_size_is_not_read(tmp_path, server):
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(BYTES + b"more")
    seen: list[Progress] = []
    assert shelf(tmp_path, server, weights=mine).find("tiny", ProgressReporter(seen.append)) is None
    assert seen == []


def test_the_record_of_a_check_counts_only_for_its_own_file(tmp_path, server):
    server.gives(HUB, Answer(BYTES))
    path = shelf(tmp_path, server).pull("tiny")
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(OTHER)
    os.utime(mine, ns=(path.stat().st_mtime_ns, path.stat().st_mtime_ns))
    assert shelf(tmp_path, server, weights=mine).find("tiny") == path


def test_a_damaged_record_counts_as_none(tmp_path, server):
    server.gives(HUB, Answer(BYTES))
    weights = shelf(tmp_path, server)
    path = weights.pull("tiny")
    (weights.folder / ".tiny.checked").write_bytes(b"\xff{")
    assert weights.find("tiny") == path


def test_a_folder_that_cannot_be_created_is_a_one_line_error(tmp_path, server):
    (tmp_path / "models").write_text("a file")
    weights = shelf(tmp_path, server)
    with pytest.raises(EverloopError, match="EVERLOOP_MODELS"):
        weights.pull("tiny")


# ---------------------------------------------------------------------------------------------- the catalogue


@pytest.mark.parametrize("card", CATALOGUE.values(), ids=lambda card: card.name)
def test_every_card_of_the_catalogue_is_consistent(card: ModelCard):
    assert sum(wheel.size for wheel in card.wheels) == card.size
    assert len({wheel.sha256 for wheel in card.wheels}) == len(card.wheels)
    assert all(len(known) == 64 for known in (card.sha256, *(wheel.sha256 for wheel in card.wheels)))
    assert card.hub.startswith("https://")
    assert card.hub.endswith(f"/{card.file}")


def test_the_default_is_in_the_catalogue():
    assert DEFAULT in CATALOGUE
