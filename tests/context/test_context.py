"""The context builder: what the prompt contains, and that the same files give the same bytes."""

from __future__ import annotations

import base64
import os

import pytest

from everloop import ContextBuilder
from everloop.log import ModelAnswered, TurnEnded
from everloop.messages import Conversation, user_message
from everloop.runtime.compactor import Histories
from everloop.store.base import Claim
from everloop.store.sqlite import SQLiteStore
from everloop.testing import check_conversation

from ..support.drawing import PIXEL


def test_the_blocks_appear_in_order_with_separators(tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "MEMORY.md").write_text("likes tea")
    for name in ("IDENTITY", "TOOLS", "USER", "SOUL", "AGENTS"):
        (tmp_path / f"{name}.md").write_text(f"text of {name}")
    blocks = ContextBuilder(tmp_path).build_system_prompt().split("\n\n---\n\n")
    order = ["Everloop", "of AGENTS", "of SOUL", "of USER", "of TOOLS", "of IDENTITY", "likes tea"]
    places = [next(n for n, block in enumerate(blocks) if text in block) for text in order]
    assert places == sorted(places)
    assert str(tmp_path) in blocks[0]
    assert "Time zone" in blocks[0]
    assert "began on" in blocks[-1]  # variable parts go last


def test_missing_files_leave_no_trace_in_the_prompt(tmp_path):
    (tmp_path / "USER.md").write_text("  \n ")
    prompt = ContextBuilder(tmp_path).build_system_prompt()
    assert "USER.md" not in prompt
    assert "AGENTS.md" not in prompt


def test_the_same_files_give_the_same_bytes_and_a_change_is_seen(tmp_path):
    file = tmp_path / "AGENTS.md"
    file.write_text("be kind")
    builder = ContextBuilder(tmp_path)
    first = builder.build_system_prompt()
    assert builder.build_system_prompt() == first == ContextBuilder(tmp_path).build_system_prompt()
    file.write_text("be bold")
    os.utime(file, ns=(1, 1))
    assert "be bold" in builder.build_system_prompt()
    file.unlink()
    assert "be bold" not in builder.build_system_prompt()


def test_a_long_file_is_truncated_with_a_note(tmp_path):
    (tmp_path / "AGENTS.md").write_text("x" * 200_000)
    prompt = ContextBuilder(tmp_path).build_system_prompt()
    assert len(prompt) < 80_000
    assert "[cut: AGENTS.md is longer than" in prompt


@pytest.mark.parametrize("name", [b"caf\xc3\xa9 \xf0\x9f\x98\x80", b"broken \xff name"])
def test_the_prompt_can_always_be_encoded(tmp_path, name):
    workspace = os.path.join(os.fsencode(tmp_path), name)
    os.mkdir(workspace)
    builder = ContextBuilder(os.fsdecode(workspace))
    builder.build_system_prompt().encode()
    content = builder.user_content("look", [os.fsdecode(workspace) + "/x.pdf"])
    assert isinstance(content, str)
    content.encode()


def test_messages_have_the_shapes_of_the_wire_format(tmp_path):
    builder = ContextBuilder(tmp_path)
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    messages = builder.build_messages(history, "c")
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    calls = [{"id": "1", "type": "function", "function": {"name": "t", "arguments": "{}"}}]
    builder.add_assistant_message(messages, None, calls)
    builder.add_tool_result(messages, "1", "t", "out")
    builder.add_assistant_message(messages, "done", [])
    assert messages[-2] == {"role": "tool", "tool_call_id": "1", "name": "t", "content": "out"}
    assert messages[-1] == {"role": "assistant", "content": "done"}
    assert check_conversation(messages) == []
    assert len(history) == 2


def test_pictures_precede_the_text_and_other_files_are_named(tmp_path):
    (tmp_path / "a.jpg").write_bytes(PIXEL)  # only the content counts
    (tmp_path / "no.png").write_bytes(b"no picture")
    media = [str(tmp_path / name) for name in ("a.jpg", "no.png", "notes.pdf")]
    content = ContextBuilder(tmp_path).user_content("look", media)
    assert isinstance(content, list)
    url = f"data:image/png;base64,{base64.b64encode(PIXEL).decode()}"
    assert content[0] == {"type": "image_url", "image_url": {"url": url}}
    assert content[1] == {"type": "text", "text": f"look\n[attachment: {media[1]}]\n[attachment: {media[2]}]"}
    assert ContextBuilder(tmp_path).user_content("look") == "look"
    assert ContextBuilder(tmp_path).user_content("look", []) == "look"


# ---------------------------------------------------------------------------------------------- histories in memory


def claim(session: int, first_seq: int = 1) -> Claim:
    return Claim("me", session, f"test:{session}", 1, "t", 0, first_seq, first_seq)


async def test_histories_in_memory_are_bounded_whatever_the_provider_does(tmp_path):
    store = SQLiteStore(tmp_path / "store.db")
    histories = Histories(store, limit=1_000_000)
    for session in range(30):
        conversation = Conversation([{"role": "system", "content": "s"}, user_message("x" * 100_000)])
        histories.keep(claim(session), conversation)
    assert sum(len(str(list(kept.conversation))) for kept in histories._kept.values()) <= 1_100_000
    assert list(histories._kept)[-1] == 29
    await store.close()


async def test_a_history_is_read_once_and_again_after_another_process_wrote(tmp_path):
    store = SQLiteStore(tmp_path / "store.db")
    histories = Histories(store)
    await store.note("me", "test:1", [ModelAnswered("old"), TurnEnded("answer")])
    first = await histories.conversation(claim(1, 3), "system")
    assert [message["content"] for message in first] == ["system", "old"]
    histories.keep(claim(1, 3), first)
    assert await histories.conversation(claim(1, 3), "system") is first
    histories.keep(claim(1, 3), first)
    changed = await histories.conversation(claim(1, 3), "another system")
    assert [message["content"] for message in changed] == ["another system", "old"]
    histories.keep(claim(1, 3), changed)
    await store.note("me", "test:1", [ModelAnswered("new"), TurnEnded("answer")])
    later = await histories.conversation(claim(1, 5), "system")
    assert [message["content"] for message in later] == ["system", "old", "new"]
    await store.close()


def test_a_builder_that_does_not_trust_its_workspace_uses_none_of_its_files(tmp_path):
    names = ("AGENTS.md", "USER.md", "HEARTBEAT.md", "memory/MEMORY.md", "skills/own/SKILL.md")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("---\nname: own\ndescription: CANARY\nalways: true\n---\nCANARY")
    for trusted in (True, False):
        builder = ContextBuilder(tmp_path, trusted=trusted)
        assert ("CANARY" in builder.build_system_prompt()) is trusted
        assert ("CANARY" in builder.heartbeat_file()) is trusted
        assert ("CANARY" in builder.skills_in("use $own")) is trusted
