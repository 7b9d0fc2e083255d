"""Which requests are admitted, by host name, origin and token, and to which owner they belong."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator

import pytest

from everloop.server.guard import TOKEN
from everloop.store.tokens import hash_of, new_token
from tests.support.commands import everloop

from .house import SECRET, House, opened_house


@pytest.fixture
async def house(tmp_path) -> AsyncIterator[House]:
    async with opened_house(tmp_path) as found:
        yield found


@pytest.fixture
async def guarded(tmp_path) -> AsyncIterator[House]:
    """A house whose guard asks every client for a token."""
    async with opened_house(tmp_path, loopback=False, token_needed=True) as found:
        yield found


# ---------------------------------------------------------------------------------------------- the name


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:8002", "[::1]", "[::1]:9", "[0:0:0:0:0:0:0:1]:9"]
)
async def test_the_names_of_this_machine_are_answered_on_any_port(house, host):
    assert (await house.ask(host=host)).status == 200


STRANGE_HOSTS = [
    "evil.test", "localhost.evil.test", "127.0.0.1.evil.test", "evil.test:8002", "localhost@evil.test", "localhost.",
    "evil.test#localhost", "localhost/evil", "localhost:x", "127.1", "0x7f000001", "0.0.0.0", "127.0.0.2", "[::]",
    "192.0.2.1", "[::1", "::1", "", "localhost evil.test", "localhost,evil.test", "foo.localhost", "-", "*",
]  # fmt: skip


@pytest.mark.parametrize("path", ["/echo", "/healthz", "/nothing"])
async def test_a_foreign_host_name_is_refused_on_every_route(house, path):
    for host in STRANGE_HOSTS:
        answer = await house.ask("GET" if path == "/healthz" else "POST", path, host=host)
        assert answer.status in (400, 403), host
        assert answer.error
    assert house.entered == []


async def test_names_in_the_settings_and_the_address_of_the_connection_are_answered(tmp_path):
    async with opened_house(tmp_path, host="127.0.0.5", hosts=["Chat.example.org", "[2001:db8::1]"]) as house:
        reader, writer = await asyncio.open_connection("127.0.0.5", house.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.5:1\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        statuses = {}
        for host in ("chat.example.org:443", "[2001:DB8:0::1]", "example.org", "x.chat.example.org"):
            reader, writer = await asyncio.open_connection("127.0.0.5", house.port)
            writer.write(f"GET /healthz HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            statuses[host] = (await reader.readline()).split()[1]
            writer.close()
        assert list(statuses.values()) == [b"200", b"200", b"403", b"403"]


async def test_a_full_url_as_target_is_checked_by_its_own_name_too(house):
    for target, entered in (
        ("http://evil.test/read", 0),
        ("http://localhost@evil.test/read", 0),
        ("http://evil.test#@localhost/read", 0),
        ("http://127.0.0.1/read", 1),
    ):
        answer = await house.ask("GET", target)
        assert (answer.status == 200) == bool(entered), target
    assert len(house.entered) == 1
    assert (await house.ask("GET", "http://127.0.0.1/read", host="evil.test")).status == 403
    assert len(house.entered) == 1


# ---------------------------------------------------------------------------------------------- the page


async def test_a_page_of_another_origin_is_refused_and_gets_no_cors_header(house):
    for origin in (
        "https://evil.test",
        "null",
        "http://localhost:3000",
        "http://127.0.0.1",
        "file://",
        "",
        "x",
        "http://[",
    ):
        answer = await house.ask(origin=origin)
        assert answer.status == 403, origin
        assert answer.error["code"] == "origin_not_allowed"
        assert not [name for name in answer.headers if name.startswith("access-control")]
    own = f"http://127.0.0.1:{house.port}"
    for origin in (
        f"{own}.evil.test",
        f"{own}/",
        f"{own}@evil.test",
        f"evil.test/{own}",
        f"ftp://127.0.0.1:{house.port}",
    ):
        assert (await house.ask(origin=origin)).status == 403, origin
    assert (await house.ask("GET", "/read", sec_fetch_site="cross-site")).status == 403
    assert (await house.ask("GET", "/healthz", origin="https://evil.test")).status == 403
    assert house.entered == []


async def test_our_own_page_is_admitted_even_behind_a_tls_proxy(tmp_path):
    async with opened_house(tmp_path, hosts=["chat.example.org"]) as house:
        own = f"http://127.0.0.1:{house.port}"
        assert (await house.ask(origin=own, sec_fetch_site="same-origin")).status == 200
        assert (await house.ask(origin="https://chat.example.org", host="chat.example.org")).status == 200
        assert (await house.ask(origin="https://chat.example.org")).status == 403
        answer = await house.ask(origin=own)
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_a_configured_origin_gets_the_headers_that_its_browser_needs_and_others_none(tmp_path):
    async with opened_house(tmp_path, origins=["https://Editor.example.org/"]) as house:
        friend = "https://editor.example.org"
        answer = await house.ask(origin=friend, sec_fetch_site="cross-site")
        assert answer.status == 200
        assert answer.header("access-control-allow-origin") == friend
        assert answer.header("vary") == "Origin"
        before = await house.ask(
            "OPTIONS", origin=friend, sec_fetch_site="cross-site",
            access_control_request_method="POST", access_control_request_headers="authorization, x-session",
        )  # fmt: skip
        assert (before.status, before.header("access-control-allow-origin")) == (204, friend)
        assert before.header("access-control-allow-headers") == "authorization, x-session"
        refused = await house.ask(origin=friend, authorization="Bearer ev_wrong")
        assert (refused.status, refused.header("access-control-allow-origin")) == (401, friend)
        evil = await house.ask("OPTIONS", origin="https://evil.test", access_control_request_method="POST")
        assert evil.status == 403
        assert "access-control-allow-origin" not in evil.headers
        own = await house.ask("OPTIONS", origin=f"http://127.0.0.1:{house.port}", access_control_request_method="POST")
        assert own.status == 405
        assert not [name for name in own.headers if name.startswith("access-control")]
        assert len(house.entered) == 1


# ---------------------------------------------------------------------------------------------- the kind


async def test_only_json_is_accepted_even_on_loopback(house):
    kinds = [
        None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
        "application/jsonp",
        "text/plain; application/json", "application/json, text/plain", "application/json; charset=latin-1",
        "application/json; charset=utf-16", "text/json",
    ]  # fmt: skip
    for kind in kinds:
        for method in ("POST", "DELETE"):
            answer = await house.ask(method, content_type=kind)
            assert answer.status == 415, kind
            assert answer.error
    assert house.entered == []
    for kind in (
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        'application/json;charset="UTF-8"',
    ):
        assert (await house.ask(content_type=kind)).status == 200, kind
    assert (await house.ask("GET", "/read")).status == 200


async def test_a_compressed_body_is_refused_unread(house):
    for encoding in ("gzip", "deflate", "br", "zstd", "identity, gzip"):
        assert (await house.ask(content_encoding=encoding)).status == 415
    assert house.entered == []
    assert (await house.ask(content_encoding="identity")).status == 200


# ---------------------------------------------------------------------------------------------- the token


async def test_a_token_gives_the_request_its_owner_and_no_other(guarded):
    anna, berta, second = await guarded.token("anna"), await guarded.token("berta"), await guarded.token("x", "anna")
    for token in (anna, berta, second, anna):
        assert (await guarded.ask(authorization=f"Bearer {token}")).status == 200
    assert guarded.owners == ["anna", "berta", "anna", "anna"]
    assert [request[TOKEN].name for request in guarded.entered] == ["anna", "berta", "x", "anna"]
    both = await asyncio.gather(*(guarded.ask(authorization=f"Bearer {(anna, berta)[n % 2]}") for n in range(20)))
    assert [json.loads(answer.body)["owner"] for answer in both] == ["anna", "berta"] * 10


async def test_a_required_token_must_be_valid(guarded):
    token = await guarded.token("anna")
    wrong = [
        None, "", "Bearer", "Bearer ", f"Basic {token}", token, f"Bearer {token[:-1]}", f"Bearer {token}A",
        "Bearer ev_", f"Bearer {token.lower()}", f"Bearer {hash_of(token)}", "Bearer anna", f"Bearer {new_token()}",
        "Bearer ' OR 1=1", f"Bearer {token},{token}", f"Bearer {token} {token}", f"Bearer {'a' * 4000}",
        "Bearer me", "Bearer null",
    ]  # fmt: skip
    for header in wrong:
        for method, path in (("POST", "/echo"), ("GET", "/read"), ("GET", "/nothing"), ("OPTIONS", "/read")):
            answer = await guarded.ask(method, path, authorization=header)
            assert answer.status == 401, header
            assert answer.header("www-authenticate").startswith("Bearer")
            assert answer.error["type"] == "authentication_error"
            assert token not in answer.body.decode()
    assert guarded.entered == []
    assert (await guarded.ask(authorization=f"bearer   {token}")).status == 200


async def test_two_tokens_in_one_request_are_refused(guarded):
    anna, berta = await guarded.token("anna"), await guarded.token("berta")
    both = f"Authorization: Bearer {anna}\r\nAuthorization: Bearer {berta}\r\n"
    head = f"GET /read HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{both}\r\n"
    (answer,) = await guarded.raw(head)
    assert answer.status == 400
    assert guarded.entered == []


async def test_a_token_revoked_by_another_process_is_refused_at_the_next_request(guarded):
    anna, berta = await guarded.token("anna"), await guarded.token("berta")
    assert (await guarded.ask(authorization=f"Bearer {anna}")).status == 200
    done = await everloop("token", "revoke", "anna", "--store", str(guarded.store.path))
    assert done.status == 0
    assert (await guarded.ask(authorization=f"Bearer {anna}")).status == 401
    assert (await guarded.ask(authorization=f"Bearer {berta}")).status == 200
    assert guarded.owners == ["anna", "berta"]


async def test_on_loopback_the_machines_user_needs_no_token_and_a_wrong_one_is_still_refused(house):
    assert (await house.ask()).status == 200
    assert house.owners == ["me"]
    assert house.entered[0][TOKEN] is None
    assert (await house.ask(authorization=f"Bearer {new_token()}")).status == 401
    token = await house.token("anna")
    for wrong in ("x", "sk-wrong", token[3:], token[:-1]):
        assert (await house.ask(authorization=f"Bearer {wrong}")).status == 401
    assert (await house.ask(authorization=f"Bearer {token}")).status == 200
    assert house.owners == ["me", "anna"]


async def test_once_a_token_has_existed_every_request_needs_one_even_after_the_last_is_revoked(house):
    assert (await house.ask()).status == 200
    made = await everloop("token", "add", "anna", "--store", str(house.store.path))  # in another process
    token = made.lines[0]
    for wrong in (None, "Bearer x", "Bearer", "Bearer ollama"):
        assert (await house.ask(authorization=wrong)).status == 401
    assert (await house.ask(authorization=f"Bearer {token}")).status == 200
    assert (await everloop("token", "revoke", "anna", "--store", str(house.store.path))).status == 0
    for wrong in (None, "Bearer x", "Bearer", f"Bearer {token}"):
        for method, path in (("POST", "/echo"), ("GET", "/read"), ("GET", "/admin"), ("GET", "/nothing")):
            assert (await house.ask(method, path, authorization=wrong)).status == 401
    assert house.owners == ["me", "anna"]
    assert (await house.ask("GET", "/healthz")).status == 200


async def test_a_server_started_after_the_last_token_was_revoked_still_requires_one(tmp_path):
    async with opened_house(tmp_path) as house:
        await house.token("anna")
        (made,) = await house.store.tokens()
        await house.store.revoke_token(made.id)
    async with opened_house(tmp_path) as house:
        for wrong in (None, "Bearer x"):
            assert (await house.ask(authorization=wrong)).status == 401
        assert house.entered == []


async def test_concurrent_requests_before_the_first_token_share_queries_and_later_ones_make_none(house, monkeypatch):
    asked = []
    exist = house.store.tokens_exist

    async def counted() -> bool:
        asked.append(1)
        await asyncio.sleep(0.05)
        return await exist()

    monkeypatch.setattr(house.store, "tokens_exist", counted)
    assert {answer.status for answer in await asyncio.gather(*(house.ask() for _ in range(20)))} == {200}
    assert len(asked) < 10
    await house.token("anna")
    assert {answer.status for answer in await asyncio.gather(*(house.ask() for _ in range(20)))} == {401}
    before = len(asked)
    assert (await house.ask()).status == 401
    assert len(asked) == before


async def test_a_token_grants_only_its_rights(guarded):
    tokens = {
        rights: await guarded.token(rights.replace(",", "-"), "me", rights) for rights in ("use", "admin", "use,admin")
    }
    for path, allowed in (("/read", {"use", "use,admin"}), ("/admin", {"admin", "use,admin"})):
        for rights, token in tokens.items():
            answer = await guarded.ask("GET", path, authorization=f"Bearer {token}")
            assert answer.status == (200 if rights in allowed else 403)
    for spelt in ("/%61dmin", "/admin?x=1", "//admin", "/./admin", "/read/../admin", "/admin/"):
        answer = await guarded.ask("GET", spelt, authorization=f"Bearer {tokens['use']}")
        assert answer.status in (403, 404), spelt
    assert len(guarded.entered) == 4


async def test_the_machines_user_has_all_rights_while_there_are_no_tokens(house):
    for path in ("/read", "/admin"):
        assert (await house.ask("GET", path)).status == 200


async def test_an_invented_key_is_accepted_until_the_first_token_exists(house):
    for made_up in ("Bearer sk-no-key-needed", "Bearer x", "Bearer ollama", "Bearer"):
        assert (await house.ask(authorization=made_up)).status == 200
    assert house.owners == ["me"] * 4
    token = await house.token("anna")
    for wrong in ("x", f"{token}x"):
        assert (await house.ask(authorization=f"Bearer {wrong}")).status == 401
    (made,) = await house.store.tokens()
    await house.store.revoke_token(made.id)
    assert (await house.ask(authorization=f"Bearer {token}")).status == 401  # what was one is never made up
    assert house.owners == ["me"] * 4
    assert (await house.ask(authorization="Bearer x")).status == 401  # nor is any key, once there was a token


@pytest.mark.parametrize(("loopback", "token_needed"), [(True, True), (False, False), (False, True)])
async def test_only_requests_that_must_be_local_act_as_the_machines_user(tmp_path, loopback, token_needed):
    async with opened_house(tmp_path, loopback=loopback, token_needed=token_needed) as house:
        for made_up in (None, "Bearer x", "Bearer"):
            assert (await house.ask(authorization=made_up)).status == 401
        assert house.entered == []


PROXIES = """
    Forwarded X-Forwarded X-Forwarded-For X-Forwarded-Host X-Forwarded-Proto X-Forwarded-Whatever X-Forward-For Via
    X-Real-IP X-Client-IP X-Cluster-Client-IP Client-IP True-Client-IP Fastly-Client-IP Fly-Client-IP X-Remote-Addr
    CF-Connecting-IP CF-Ray CF-Visitor CF-IPCountry CDN-Loop X-Original-URL X-Original-Forwarded-For X-Rewrite-URL
    Akamai-Origin-Hop X-Akamai-Edgescape X-Azure-ClientIP X-Azure-Ref X-Appengine-Country X-Amz-Cf-Id X-Host
    X-Envoy-External-Address Tailscale-User-Login Tailscale-User-Name Ngrok-Agent-Ips X-Vercel-Id X-Varnish
    WL-Proxy-Client-IP Proxy-Connection X-Bluecoat-Via X-Remote-User DO-Connecting-IP
"""
ORDINARY = """
    User-Agent Accept-Language X-Title HTTP-Referer OpenAI-Organization OpenAI-Beta X-Stainless-Lang X-Request-Id
    X-Stainless-Retry-Count Traceparent Tracestate Baggage B3 X-B3-TraceId X-Amzn-Trace-Id X-Goog-Api-Client
    X-OpenWebUI-User-Name X-OpenWebUI-Chat-Id X-Api-Key X-GitHub-Api-Version Anthropic-Version X-Requested-With DNT
"""


async def test_headers_that_clients_send_by_default_do_not_indicate_a_proxy(house):
    assert (await house.ask(**dict.fromkeys(ORDINARY.split(), "x"))).status == 200


@pytest.mark.parametrize("header", PROXIES.split())
async def test_a_request_through_a_local_proxy_does_not_act_as_the_machines_user(house, header):
    for authorization in (None, "Bearer x"):
        assert (await house.ask(**{header: "for=192.0.2.1"}, authorization=authorization)).status == 401
    assert house.entered == []
    token = await house.token("anna")
    assert (await house.ask(**{header: "for=192.0.2.1"}, authorization=f"Bearer {token}")).status == 200


async def test_the_use_of_a_token_is_noted_once_an_hour(guarded):
    token = await guarded.token("anna")
    before = time.time()
    await guarded.ask(authorization=f"Bearer {token}")
    (first,) = await guarded.store.tokens()
    assert first.last_used_at is not None
    assert first.last_used_at >= before
    commits = guarded.store.writer.commits
    await guarded.ask(authorization=f"Bearer {token}")
    assert await guarded.store.tokens() == [first]
    assert guarded.store.writer.commits == commits  # no request waits for the disk just for this


async def test_only_health_needs_no_token(guarded):
    assert (await guarded.ask("GET", "/healthz")).status == 200
    assert (await guarded.ask("GET", "/healthz?x=1")).status == 200
    for method, path in (
        ("POST", "/healthz"),
        ("GET", "/healthz/"),
        ("GET", "/healthz/../read"),
        ("GET", "/read?/healthz"),
    ):
        assert (await guarded.ask(method, path)).status == 401
    assert len(guarded.entered) == 2


async def test_with_an_unreadable_store_every_request_is_refused_without_details(guarded, caplog):
    token = await guarded.token("anna")
    await guarded.store.close()
    guarded.store.path.write_bytes(b"not a database" * 100)
    for file in guarded.store.path.parent.glob("store.db-*"):
        file.unlink()
    answer = await guarded.ask(authorization=f"Bearer {token}")
    assert (answer.status, answer.error["type"]) == (503, "server_error")
    assert str(guarded.store.path) not in answer.body.decode()
    assert guarded.entered == []


# ---------------------------------------------------------------------------------------------- what goes out


async def test_every_response_has_its_own_id_and_security_headers(house):
    answers = [
        await house.ask(),
        await house.ask("GET", "/healthz"),
        await house.ask("GET", "/nothing"),
        await house.ask("POST", "/broken"),
        await house.ask(host="evil.test"),
        await house.ask(authorization="Bearer ev_x"),
        await house.ask("POST", "/broken_stream"),
        *(await house.raw("nonsense\r\n\r\n")),
    ]
    assert [answer.status for answer in answers] == [200, 200, 404, 500, 403, 401, 200, 400]
    for answer in answers:
        assert answer.header("x-content-type-options") == "nosniff"
        assert answer.header("referrer-policy") == "no-referrer"
        assert answer.header("cache-control") == "no-store"
        assert answer.header("server") == "everloop"
        assert "default-src 'none'" in answer.header("content-security-policy")
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert len({answer.header("x-request-id") for answer in answers} - {""}) == len(answers)


async def test_an_unknown_address_and_a_wrong_method_are_errors_in_openais_format(house):
    assert (await house.ask("GET", "/nothing")).error["code"] == "unknown_url"
    assert (await house.ask("POST", "/nothing/%2e%2e/%00")).status == 404
    wrong = await house.ask("GET", "/echo")
    assert (wrong.status, wrong.header("allow"), wrong.error["code"]) == (405, "DELETE, POST", "method_not_allowed")
    assert (await house.ask(expect="200-maybe")).status == 417
    assert (await house.ask(expect="200-maybe")).error
    assert house.entered == []


async def test_internal_errors_are_logged_and_not_sent(house, caplog):
    with caplog.at_level(logging.ERROR):
        answer = await house.ask("POST", "/broken")
    assert (answer.status, answer.error["type"]) == (500, "server_error")
    assert SECRET.encode() not in answer.body
    assert SECRET in caplog.text
    assert answer.header("x-request-id") in caplog.text
    raised = await house.ask("POST", "/unavailable")
    assert (raised.status, raised.error["type"]) == (500, "server_error")


async def test_a_stream_that_fails_is_cut_off_and_nothing_is_written_after_it(house):
    kind = "Content-Type: application/json\r\nContent-Length: 2"
    (answer,) = await house.raw(f"POST /broken_stream HTTP/1.1\r\nHost: localhost\r\n{kind}\r\n\r\n{{}}")
    assert answer.body == b"5\r\nbegun\r\n"  # without the last chunk, which would say that it is whole
    assert len(house.entered) == 1


async def test_a_closing_guard_refuses_new_requests_and_lets_the_others_end(house):
    under_way = asyncio.create_task(house.ask("POST", "/wait"))
    while not house.entered:
        await asyncio.sleep(0.01)
    house.guard.close()
    answer = await house.ask(connection=None)
    assert (answer.status, answer.header("connection")) == (503, "close")
    assert answer.header("retry-after")
    assert (await house.ask("GET", "/healthz")).status == 200
    house.gate.set()
    assert (await under_way).status == 200
