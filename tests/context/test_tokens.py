"""The token estimate: close to the real counts from the start, closer with every answer, and cheap."""

from __future__ import annotations

import inspect
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everloop.context import window
from everloop.context.window import LONG, Meter, weigh, weigh_text, weigh_tools
from everloop.messages import assistant_message, tool_message, user_message

# Texts with the token counts of real tokenizers: o200k (GPT-4o and later), Llama 3, Qwen 2.5, DeepSeek V3.
TEXTS = {
    "English": (
        "The store keeps every step of a turn before the next one begins, so a machine that loses its power in "
        "the middle of the night goes on in the morning where it had stopped. Nobody has to ask again, and "
        "nothing is done twice. When you want to know what happened, you read the log from the top; it is "
        "written in plain words, and each line says who did what and when."
    ),
    "code": (
        "def shortest(lines: list[str], limit: int = 80) -> str | None:\n"
        '    """The shortest line that is not empty, if it fits."""\n'
        "    found = min((line for line in lines if line.strip()), key=len, default=None)\n"
        "    if found is None or len(found) > limit:\n"
        "        return None\n"
        "    for number, line in enumerate(lines, start=1):\n"
        "        if line == found:\n"
        '            logger.debug("line %d of %d", number, len(lines))\n'
        "    return found.rstrip()\n"
    ),
    "JSON": (
        '{"status":"ok","items":[{"id":"a81f-22","name":"north bed","litres":7.5,"tags":["beans","peas"],"upd'
        'ated_at":"2026-03-14T09:26:53Z","enabled":true},{"id":"a81f-23","name":"south bed","litres":12,"tags'
        '":[],"updated_at":"2026-03-15T11:02:00Z","enabled":false}],"next":null,"total":2}'
    ),
    "Chinese": (
        "每一步都先写入日志，然后才开始下一步。如果机器在半夜突然断电，第二天早上它会从停下的地方继续工作"
        "，不会丢失任何消息，也不会重复执行已经完成的操作。想知道发生了什么，只要从头阅读日志就可以了，每"
        "一行都清楚地写着谁在什么时候做了什么。"
    ),
    "Korean": (
        "모든 단계는 다음 단계가 시작되기 전에 기록됩니다. 한밤중에 전원이 꺼져도 아침이 되면 멈춘 곳에서 다시 "
        "시작하며, 메시지를 잃어버리거나 이미 끝난 일을 두 번 하지 않습니다. 무슨 일이 있었는지 알고 싶으면 "
        "기록을 처음부터 읽으면 됩니다."
    ),
    "Russian": (
        "Каждый шаг записывается раньше, чем начинается следующий. Если ночью пропадёт питание, утром работа "
        "продолжится с того же места: ни одно сообщение не потеряется и ничего не будет сделано дважды. Чтобы "
        "узнать, что произошло, достаточно прочитать журнал с начала: в каждой строке сказано, кто, что и "
        "когда сделал."
    ),
}
COUNTS = {
    "English": (82, 82, 82, 82),
    "code": (109, 109, 110, 112),
    "JSON": (107, 106, 125, 114),
    "Chinese": (80, 83, 69, 58),
    "Korean": (72, 73, 85, 86),
    "Russian": (70, 85, 85, 85),
}


MIX = ("English", "code", "JSON")


def counted(model: int, *kinds: str, times: int = 10) -> tuple[int, int]:
    """Return the units and tokens of a request built from such texts."""
    return sum(weigh_text(TEXTS[kind]) for kind in kinds) * times, sum(COUNTS[kind][model] for kind in kinds) * times


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("model", range(4))
def test_before_the_first_answer_the_estimate_is_slightly_too_high(kind, model):
    units, tokens = counted(model, kind)
    assert tokens < Meter().tokens("new", units) < 2.1 * tokens


@pytest.mark.parametrize("model", range(4))
def test_one_ratio_fits_prose_code_and_data_within_a_seventh(model):
    ratios = [tokens / units for units, tokens in (counted(model, kind) for kind in MIX)]
    assert max(ratios) / min(ratios) < 1.28
    plain = [COUNTS[kind][model] / len(TEXTS[kind].encode()) for kind in MIX]
    assert max(plain) / min(plain) > 1.5, "bytes alone would do as well"


@pytest.mark.parametrize("kinds", [MIX, ("Chinese",), ("Korean", "English"), ("Russian", "JSON")])
@pytest.mark.parametrize("model", range(4))
def test_after_a_few_answers_the_estimate_is_within_a_tenth(kinds, model):
    meter = Meter()
    for times in (3, 5, 8):
        meter.observe("m", *counted(model, *kinds, times=times))
    units, tokens = counted(model, *kinds, *kinds[:1], times=20)
    assert abs(meter.tokens("m", units) / tokens - 1) < 0.1
    assert abs(meter.units("m", tokens) / units - 1) < 0.1


def test_a_model_learns_nothing_from_another():
    meter = Meter()
    meter.observe("a", 10_000, 5_000)
    assert meter.tokens("a", 1_000) == 500
    assert meter.tokens("b", 1_000) == window.START * 1_000


def test_the_subject_of_a_session_may_change():
    meter = Meter()
    for _ in range(50):
        meter.observe("m", 10_000, 2_000)
    for _ in range(5):
        meter.observe("m", 10_000, 4_000)
    assert 3_600 < meter.tokens("m", 10_000) <= 4_000


@pytest.mark.parametrize("counted", [0, -5, 3, 900, 14_000, 10**12])
def test_impossible_counts_are_ignored(counted):
    meter = Meter()
    meter.observe("m", 10_000, 2_500)
    meter.observe("m", 10_000, counted)  # such as a count that excludes cached tokens
    assert meter.tokens("m", 10_000) == 2_500


@pytest.mark.parametrize("units", [0, -10, 20, 100, 900])
def test_a_tiny_request_does_not_calibrate(units):
    meter = Meter()
    meter.observe("m", units, 90)
    meter.observe("m", units, units)
    assert meter.tokens("m", 10_000) == window.START * 10_000


def test_memory_does_not_grow_with_the_number_of_models():
    meter = Meter()
    for number in range(1_000):
        meter.observe(f"model {number}", 10_000, 4_000)
        meter.tokens("model 0", 1)
        meter.observe("model 1", 10_000, 4_000)
    assert len(meter._ratios) == 64
    for name in ("model 0", "model 1"):
        assert meter.tokens(name, 10_000) == 4_000, "a model in use was evicted"


@given(st.lists(st.tuples(st.integers(-10, 10**7), st.integers(-10, 10**7)), max_size=50))
def test_the_ratio_always_stays_within_that_of_real_tokenizers(seen):
    meter = Meter()
    for units, count in seen:
        meter.observe("m", units, count)
    assert 0.12 <= meter.ratio("m") <= 1.2


# ---------------------------------------------------------------------------------------------- weighing


def test_everything_that_is_sent_counts():
    text = "Water the beans. " * 50
    bare = weigh(user_message(""))
    assert weigh(user_message(text)) == bare + weigh_text(text)
    assert weigh(user_message([{"type": "text", "text": text}])) == bare + weigh_text(text)
    assert weigh(tool_message("c", "t", text)) == bare + weigh_text(text)
    call = assistant_message(None, [("c", "write_file", {"path": "a", "content": text})])
    assert weigh(call) > bare + weigh_text(text)
    assert weigh(assistant_message(None, [("c", "a_long_name_of_a_tool" * 20, {})])) > bare + 300
    assert weigh({"role": "assistant", "content": None}) == bare > 0
    assert weigh_tools([{"type": "function", "function": {"name": "t", "description": text}}]) > weigh_text(text)


@pytest.mark.parametrize("size", [100, 1_000_000])
def test_a_picture_costs_the_same_however_many_bytes_it_has(size):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * size}}
    assert weigh(user_message([part, part])) == weigh(user_message("")) + 2 * window.PICTURE


def test_a_part_of_an_unknown_kind_counts_by_its_json():
    part = {"type": "input_audio", "input_audio": {"data": "x" * 5_000}}
    assert weigh(user_message([part])) > 5_000


def test_indentation_weighs_little():
    flat = "for line in lines:\nif line:\nyield line\n" * 20
    assert weigh_text(flat) < weigh_text(flat.replace("\n", "\n        ")) < 1.4 * weigh_text(flat)


@given(st.text(max_size=300), st.text(max_size=300))
def test_weights_of_texts_add_up(first, second):
    assert abs(weigh_text(first + second) - weigh_text(first) - weigh_text(second)) <= 2
    assert weigh_text(first) >= 0


@given(st.text(st.characters(codec=None, categories=["Cs", "Ll"]), max_size=20))
def test_lone_surrogates_can_be_weighed(text):
    assert weigh_text(text) >= 0


def test_the_sampled_weight_of_a_very_long_text_is_close_to_the_exact_one():
    parts = ["Plain words, one after another. ", "Она ответила: «Хорошо». ", "漢字かな交じり文 ", "0x1F 0X2E {};\n"]
    text = "".join(part * (7_000 + 1_000 * number) for number, part in enumerate(parts * 4))
    assert len(text) > LONG
    whole = sum(weigh_text(text[start : start + 1000]) for start in range(0, len(text), 1000))
    assert abs(weigh_text(text) - whole) < 0.02 * whole


def test_weighing_is_quick_and_linear():
    text = inspect.getsource(json.decoder) * 100
    start = time.process_time()
    weigh_text(text)
    assert time.process_time() - start < len(text) / 50_000_000 + 0.02
