"""Web addresses: one interpretation, or none."""

from __future__ import annotations

import pytest
import yarl
from hypothesis import given
from hypothesis import strategies as st

from everloop.tools.web.urls import BadURL, parse_url

from ...support.cases import each


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("http://example.com", "http://example.com/"),
        ("HTTPS://Example.COM:443/A?b=C#fragment", "https://example.com/A?b=C"),
        ("  http://example.com:80/ \n", "http://example.com/"),
        ("https://example.com:8443", "https://example.com:8443/"),
        ("http://example.com?q", "http://example.com/?q"),
        ("http://example.com./x", "http://example.com/x"),
        ("http://my_host.example/x", "http://my_host.example/x"),
        ("http://example.com/a b?c d", "http://example.com/a%20b?c%20d"),
        ("http://example.com/%41%2f%zz%", "http://example.com/%41%2f%25zz%25"),
        ("http://example.com/ü?q=ä\\", "http://example.com/%C3%BC?q=%C3%A4%5C"),
        ("http://example.com/a'b(c)*;=,!$&+~", "http://example.com/a'b(c)*;=,!$&+~"),
        ("http://example.com/?next=http://a@b/", "http://example.com/?next=http://a@b/"),
        ("http://bücher.example/", "http://xn--bcher-kva.example/"),
        ("http://faß.example/", "http://xn--fa-hia.example/"),
        ("http://ｅｘａｍｐｌｅ．ｃｏｍ/", "http://example.com/"),
        ("http://[2606:4700:0:0::1111]:8080/", "http://[2606:4700::1111]:8080/"),
        ("http://1.1.1.1/", "http://1.1.1.1/"),
    ],
)
def test_an_address_is_normalized(given, asked):
    assert str(parse_url(given)) == asked


REFUSED = [
    "",
    "ftp://a/", "file:///etc/passwd", "gopher://a/", "data:text/html,x", "javascript:alert(1)", "//a/b", "a.example",
    "http:a.example", "http:/a.example", "http:///a", "http://", "http://:80/", "http://a:0/", "http://a:65536/",
    "http://a:8o/", "http://a:/", "http://a:٨٠/", "http://u@a/", "http://u:p@a/", "http://a@b@c/", "http://a\\@b/",
    "http://a\\b/", "http://a/\\b", "http://a\tb/", "http://a\nb/", "http://a/x\r\ny", "http://a/\x00", "http://a/\x7f",
    "http://a/\u202eb", "http://a\u200b.example/", "http://a b/", "http://%61/", "http://127.1/", "http://127.0.1/",
    "http://2130706433/", "http://0x7f000001/", "http://0x7f.1/", "http://0177.0.0.1/", "http://127.0.0.01/",
    "http://127.0.0.0x1/", "http://017700000001/", "http://1.2.3.4.5/", "http://256.1.1.1/", "http://a.1/",
    "http://a.0x1f/", "http://0/", "http://0x/", "http://１２７.１/", "http://[fe80::1%25lo]/", "http://[fe80::1%lo]/",
    "http://[::1/", "http://[]/", "http://[::g]/", "http://[1.2.3.4]/", "http://[::1]x/", "http://a..b/", "http://.a/",
    "http://-a.example/", "http://a..../", f"http://{'a' * 64}.example/", f"http://{'.'.join(['a' * 60] * 5)}/",
    "http://a<b/", "http://a,b/", "http://a^b/", "http://ℂ∕.example/", "http://\ud800/", "http://a/\ud800",
]  # fmt: skip


@each("given", REFUSED)
def test_an_ambiguous_or_invalid_address_is_refused(given):
    with pytest.raises(BadURL):
        parse_url(given)


def test_a_redirect_is_parsed_as_strictly():
    here = parse_url("https://a.example/b/c?d")
    assert str(here.join("../x")) == "https://a.example/x"
    assert str(here.join("//b.example/y")) == "https://b.example/y"
    assert str(here.join("?z")) == "https://a.example/b/c?z"
    assert str(here.join("http://b.example")) == "http://b.example/"
    for location in (
        "http://127.1/",
        "http:\\\\a",
        "file:///x",
        "http://a\t.example/",
        "//u@a/",
        "http://[x]/",
        "/x\ty",
        "//a\n/",
    ):
        with pytest.raises(BadURL):
            here.join(location)


def test_an_overlong_address_is_refused():
    with pytest.raises(BadURL):
        parse_url("http://a.example/" + "x" * 9000)


hosts = st.one_of(
    st.text("abz019.-_[]:%@\\/?#０。①Ⅷ\u3002\u00ad\t ", min_size=1, max_size=20),
    st.text(min_size=1, max_size=10),
)


@given(scheme=st.sampled_from(["http", "https", "HTTP"]), host=hosts, rest=st.text(max_size=20))
def test_the_client_parses_a_checked_address_the_same_way(scheme, host, rest):
    try:
        url = parse_url(f"{scheme}://{host}/{rest}")
    except BadURL:
        return
    text = str(url)
    assert text.isascii()
    assert text.isprintable()
    client = yarl.URL(text, encoded=True)
    assert (client.scheme, client.raw_host, client.port, str(client)) == (url.scheme, url.host, url.port, text)
    assert parse_url(text) == url
