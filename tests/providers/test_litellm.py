"""LiteLLMProvider with the real package, in an environment of its own, against a server on loopback."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from everloop.errors import ConfigError
from everloop.providers.litellm import LiteLLMProvider
from tests.clients.environments import python_environment, source_environment
from tests.support.places import ROOT

pytestmark = pytest.mark.timeout(300)  # the first test waits for everything that happens in the process

CANARY = "canary-of-another-endpoint"
SCENES = ROOT / "tests" / "support" / "litellm_scenes.py"
ECHO_CALLS = [["echo", {"text": "a"}, None, True], ["echo", {"text": "é\n"}, None, True]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what all scenes observed, in one process, because the package takes seconds to import."""
    python = python_environment("litellm-provider")
    folder = tmp_path_factory.mktemp("litellm")
    (folder / ".env").write_text("FROM_DOTENV=1\nOPENAI_API_BASE=http://127.0.0.1:9/v1\n")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "OPENAI_API_KEY": CANARY,
        "GROQ_API_KEY": CANARY,
        **source_environment(),
    }
    done = subprocess.run(
        [str(python), str(SCENES), "results.json"], cwd=folder, env=environment, capture_output=True, timeout=280
    )
    results = folder / "results.json"
    assert results.exists(), done.stderr.decode()
    return {**json.loads(results.read_text()), "output": (done.stdout + done.stderr).decode()}


def test_a_chat_gives_text_reasoning_and_usage(seen):
    answer = seen["first_use"]
    assert (answer["content"], answer["reasoning"], answer["finish"]) == ("good day", "be polite", "stop")
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["headers"]["Authorization"] == "Bearer my-key"


def test_the_import_does_not_block_the_event_loop(seen):
    assert seen["first_use"]["gap"] < seen["first_use"]["took"] / 2


def test_a_stream_shows_each_token_and_ends_with_the_whole_answer(seen):
    answer = seen["streamed"]
    assert answer["shown"] == [["", "think "], ["", "first"], ["one ", ""], ["two ", ""], ["three", ""]]
    assert (answer["content"], answer["reasoning"], answer["finish"]) == ("one two three", "think first", "stop")
    assert answer["usage"]["completion_tokens"] == 3


def test_tools_are_sent_and_calls_are_complete_whole_and_streamed(seen):
    scene = seen["tools"]
    for how in ("whole", "pieces"):
        assert (scene[how]["calls"], scene[how]["finish"]) == (ECHO_CALLS, "tool_calls")
    assert [tools[0]["function"]["name"] for tools in scene["tools"]] == ["echo", "echo"]
    assert scene["model"] == "other"


def test_an_agent_works_through_it(seen):
    assert seen["agent"]["said"] == "It is there."
    assert "note.txt" in seen["agent"]["result"]["content"]
    assert seen["agent"]["invalid"] == 0


def test_a_picture_is_sent_and_the_callers_messages_stay_unchanged(seen):
    assert "data:image/png;base64,iVBORw0KGgo=" in json.dumps(seen["picture"]["sent"])
    assert seen["picture"]["untouched"]


def test_options_reach_the_server_and_win_over_the_settings(seen):
    chosen, sent = seen["options"]["chosen"], seen["options"]["sent"]
    assert {name: sent.get(name) for name in chosen} == chosen
    assert (seen["settings"]["sent"]["temperature"], seen["settings"]["sent"]["max_tokens"]) == (0.25, 77)


@pytest.mark.parametrize("name", ["user", "metadata", "verbosity"])
def test_an_unsupported_option_is_refused_by_name(seen, name):
    refusal = seen["refused"][name]
    assert (refusal["status"], refusal["retryable"]) == (400, False)
    assert name in refusal["error"]
    assert seen["refused"]["requests"] == 0


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
@pytest.mark.parametrize("how", ["chat", "stream"])
def test_an_error_says_whether_and_when_to_retry(seen, how, status):
    error = seen["errors"]["seen"][f"{how} {status}"]
    assert (error["status"], error["retry_after"]) == (status, 3.0)
    assert error["retryable"] == (status >= 429)
    assert "told to fail" in error["error"]
    assert "\n" not in error["error"]


def test_it_does_not_retry_by_itself(seen):
    assert seen["errors"]["requests"] == len(seen["errors"]["seen"])


def test_a_lost_connection_may_be_temporary_and_an_unknown_api_is_not(seen):
    assert (seen["broken"]["cut"]["retryable"], seen["broken"]["cut"]["status"]) == (True, None)
    assert seen["broken"]["nobody"]["retryable"]
    assert not seen["broken"]["nonsense"]["retryable"]
    assert "no-such-api" in seen["broken"]["nonsense"]["error"]


def test_the_timeouts_are_kept(seen):
    late = seen["late"]
    assert "no first token within 0.3 s" in late["first"]["error"]
    assert "nothing came for 0.3 s" in late["between"]["error"]
    assert "no answer within 0.3 s" in late["whole"]["error"]
    assert all(late[how]["retryable"] for how in ("first", "between", "whole"))
    assert late["took"] < 20


def test_leaving_a_stream_or_cancelling_closes_the_connection(seen):
    assert seen["left"] == {"cancelled": True}


def test_no_key_of_the_environment_goes_to_a_server_named_by_its_address(seen):
    assert CANARY not in json.dumps(seen)
    assert seen["no_key"]["headers"]["Authorization"]


def test_only_the_endpoint_is_contacted(seen):
    assert seen["contacted"]
    assert [line for line in seen["contacted"] if "'127.0.0.1'" not in line or "socket.connect" not in line] == []


def test_a_dotenv_file_in_the_folder_is_not_read(seen):
    assert seen["dotenv"] is None


def test_nothing_is_printed_and_one_thread_serves_all(seen):
    assert seen["output"] == ""
    assert seen["threads"] == 1


def test_a_partly_installed_package_says_what_to_install(seen):
    assert "everloop[litellm]" in seen["half_installed"]["error"]
    assert not seen["half_installed"]["retryable"]


def test_without_the_package_it_says_what_to_install():
    with pytest.raises(ConfigError, match=r"everloop\[litellm\]"):
        LiteLLMProvider("groq/some-model")
