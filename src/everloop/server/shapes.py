"""The body of a chat request as OpenAI's API describes it: what msgspec checks while it parses.

The OpenAPI document is made from these types, so what they say is what the server takes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

__all__ = ["FIXED", "LAST", "ChatBody"]

# Parameters that the server knows and does nothing for: the values that ask for nothing. Any other is refused.
FIXED: dict[str, tuple[Any, ...]] = {
    "n": (1, None),
    "logprobs": (False, None),
    "top_logprobs": (0, None),
    "modalities": (["text"], None),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "store": (False, None),
    "service_tier": ("auto", "default", None),
    "functions": (None,),
    "function_call": (None,),
}
LAST = 2**63 - 1  # the largest integer that every JSON reader takes

# In Python "$" is also the place before a last line end.
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}(?!\n)$")]
Id = Annotated[str, Meta(min_length=1, max_length=256)]
PersonName = Annotated[str, Meta(min_length=1, max_length=64)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Tokens = Annotated[int, Meta(ge=1, le=LAST)]
Schema = Annotated[dict[str, Any], Meta(extra_json_schema={"properties": {"type": {"enum": ["object"]}}})]

# ---------------------------------------------------------------------------------------------- parts


class TextPart(Struct, tag="text", tag_field="type"):
    text: str


class RefusalPart(Struct, tag="refusal", tag_field="type"):
    refusal: str


class ImageUrl(Struct):
    url: Annotated[
        str,
        Meta(
            pattern="^(https?://.|data:image/(png|jpe?g|gif|webp);base64,.)",
            description="An address, or the picture itself: data:image/png;base64,… (png, jpeg, gif or webp)",
            examples=["https://example.com/picture.png"],
        ),
    ]
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Struct, tag="image_url", tag_field="type"):
    image_url: ImageUrl


class OnlyPart(Struct):
    """A text where nothing else may stand. (A tag that has no alternative could be left out.)"""

    type: Literal["text"]
    text: str


Text = str | Annotated[list[OnlyPart], Meta(min_length=1)]

# ---------------------------------------------------------------------------------------------- messages


class SystemMessage(Struct, tag="system", tag_field="role"):
    content: Text
    name: PersonName | None = None


class DeveloperMessage(Struct, tag="developer", tag_field="role"):
    content: Text
    name: PersonName | None = None


class UserMessage(Struct, tag="user", tag_field="role"):
    content: str | Annotated[list[TextPart | ImagePart], Meta(min_length=1)]
    name: PersonName | None = None


class CalledFunction(Struct):
    name: Name
    arguments: Annotated[str, Meta(description="A JSON object, as text")]


class ToolCall(Struct):
    id: Id
    function: CalledFunction
    type: Literal["function"] = "function"


class AssistantMessage(Struct, tag="assistant", tag_field="role"):
    """What the model said before; it needs content, a refusal or calls."""

    content: str | Annotated[list[TextPart | RefusalPart], Meta(min_length=1)] | None = None
    refusal: str | None = None
    name: PersonName | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=128)] | None = None
    function_call: Any = None
    audio: Any = None


class ToolMessage(Struct, tag="tool", tag_field="role"):
    """The result of a call in the assistant's message before it."""

    content: Text
    tool_call_id: Id
    name: str | None = None


AnyMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage

# ---------------------------------------------------------------------------------------------- tools


class Function(Struct, omit_defaults=True):
    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Struct):
    function: Function
    type: Literal["function"] = "function"


class ChosenFunction(Struct):
    name: Name


class ToolChoice(Struct):
    """One of the request's tools, which the model must call."""

    function: ChosenFunction
    type: Literal["function"]


# ---------------------------------------------------------------------------------------------- the rest


class TextFormat(Struct, tag="text", tag_field="type"):
    pass


class JsonFormat(Struct, tag="json_object", tag_field="type"):
    pass


class NamedSchema(Struct, omit_defaults=True, forbid_unknown_fields=True):
    name: Name
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class SchemaFormat(Struct, tag="json_schema", tag_field="type"):
    json_schema: NamedSchema


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Only together with `stream`."""

    include_usage: bool | None = None
    include_obfuscation: Any = None


class ChatBody(Struct, forbid_unknown_fields=True):
    """A request for an answer. Where messages hold fields that are not named here, these are left out."""

    messages: Annotated[list[AnyMessage], Meta(min_length=1)]
    model: str | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    stop: (
        Annotated[str, Meta(min_length=1)]
        | Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=4)]
        | None
    ) = None
    seed: Annotated[int, Meta(ge=-LAST - 1, le=LAST)] | None = None
    response_format: TextFormat | JsonFormat | SchemaFormat | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        dict[Annotated[str, Meta(pattern=r"^[0-9]{1,9}(?!\n)$")], Annotated[int, Meta(ge=-100, le=100)]] | None
    ) = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    user: str | None = None
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    n: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    store: Any = None
    service_tier: Any = None
    functions: Any = None
    function_call: Any = None
