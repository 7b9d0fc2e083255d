"""The settings of a channel: where its secrets come from, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from everloop.channels.base import SHIPPED, Options, make_channel
from everloop.errors import ConfigError
from everloop.testing.channels import config_of


def test_a_secret_comes_from_the_environment_the_settings_or_a_file_and_is_shown_nowhere(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("of-the-file\n")
    file = {"token_file": str(tmp_path / "token")}
    for table, env, wanted in (
        (file, {}, "of-the-file"),
        ({**file, "token": "of-the-settings"}, {}, "of-the-settings"),
        ({"token": "x"}, {"EVERLOOP_CHANNEL_MY_WORK_TOKEN": " of-the-environment "}, "of-the-environment"),
    ):
        options = Options("my-work", table, env)
        assert options.secret("token") == wanted
        options.check()
        assert options.redacted(f"GET /bot{wanted}/x") == "GET /bot…/x"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "token is missing: set it, or token_file, or the variable EVERLOOP_CHANNEL_WORK_TOKEN"),
        ({"token": 5}, "token must be one line of text"),
        ({"token": "canary\nx"}, "token must be one line of text"),
        ({"token_file": "/no/such"}, "token_file cannot be read (No such file or directory): /no/such"),
    ],
)
def test_an_invalid_secret_is_reported_without_showing_it(table: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Options("work", table, {}).secret("token")
    assert str(caught.value) == f"[channels.work] {said}"


@pytest.mark.parametrize("copied", ["canary one", "canary\N{HORIZONTAL ELLIPSIS}"])
def test_a_token_that_was_not_copied_whole_is_refused_without_showing_it(copied: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Options("work", {"token": copied}, {}).token("token")
    assert str(caught.value) == "[channels.work] token has characters that no token has: copy it again"


def test_an_unknown_network_is_reported_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        make_channel(config_of({"name": "pigeon"}))
    assert all(network in str(caught.value) for network in ("pigeon", *SHIPPED))
