"""What requests may hold: OpenAI's fields as far as they are served, and what SGLang and vLLM add to them.

An unknown field is an error, not a silence: a misspelt `temprature` would be answered as if it were not there. What
OpenAI has and this server has not (tools, answers in a schema, images, audio) is a field all the same, with the values
that ask for nothing: any other is refused as unsupported.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST_CHOICES, MOST_STOPS, MOST_TOP = 16, 16, 20
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Stop = Annotated[str, Field(min_length=1, max_length=200)]
TokenText = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[int, Field(ge=0)]


class Body(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class StreamOptions(Body):
    """What a stream tells beside the text."""

    include_usage: bool = False
    """One more event at the end, with the usage and no choices."""
    continuous_usage_stats: bool = False
    """The usage so far in every event."""


class Common(Body):
    """Fields of both kinds of request."""

    model: str | None = Field(default=None, max_length=1000)
    """The name that /v1/models lists; none is that one."""
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = 1
    """How many answers; the i-th is drawn with seed + i."""
    stream: bool | None = False
    """Send the text as it is made (server-sent events)."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    """Strings at which the answer ends; they are not part of it."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_STOPS)] | None = None
    """Tokens at which the answer ends, beside the target's own."""
    ignore_eos: bool = False
    """Go on past the target's own stop tokens."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 is greedy; none is 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """0 and -1 are off."""
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    logit_bias: dict[TokenText, Bias] | None = None
    """Token id to what is added to its logit."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """The same seed gives the same text; none draws one."""
    num_steps: Annotated[int, Field(ge=0, le=64)] | None = None
    """Levels drafted a round at most, 0 for plain decoding; none is the server's own."""
    return_token_ids: bool = False
    """Add `token_ids` to choices (and to the events of a stream), and `prompt_token_ids`."""
    mark_accepted: bool = False
    """Add `accepted` to choices: pieces of the text, each with whether its token was drafted and stood."""
    user: str | None = None
    """Taken and not used, as are `metadata`, `store`, `service_tier`, `safety_identifier` and `prompt_cache_key`."""
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _agrees(self) -> "Common":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for stream: true")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


Nothing = Annotated[list[Any], Field(max_length=0)]


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    tool_calls: Nothing | None = None
    """Unsupported: none, or an empty list."""
    function_call: None = None
    """Unsupported: none."""
    refusal: str | None = None
    """Taken and not used, as are `audio` and `annotations`: what an answer of this protocol brings may be sent back."""
    audio: None = None
    annotations: Nothing | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class TextFormat(Body):
    """The only form of answer that is served: `json_object` and `json_schema` are unsupported."""

    type: Literal["text"]


class ChatRequest(Common):
    """A conversation to be answered. Tools, functions and answers in JSON are unsupported."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """The older name of max_completion_tokens."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of an answer at most; none is the server's limit."""
    logprobs: bool | None = False
    """Tell the probability of every token."""
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    """And of so many of the likeliest; only with `logprobs`."""
    add_generation_prompt: bool = True
    """Begin the answer's turn after the last message."""
    continue_final_message: bool = False
    """Go on with the last message instead."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Told to the target's chat template."""
    response_format: TextFormat | None = None
    """Unsupported: none, or text."""
    tools: Nothing | None = None
    """Unsupported: none, or an empty list."""
    tool_choice: Literal["none", "auto"] | None = None
    """Nothing to choose from: `required` and a named tool are unsupported."""
    parallel_tool_calls: bool | None = None
    """Taken and not used."""
    functions: Nothing | None = None
    """Unsupported: none, or an empty list."""
    function_call: Literal["none", "auto"] | None = None
    """Nothing to call: a named function is unsupported."""
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    """Only text."""

    @model_validator(mode="after")
    def _chat_agrees(self) -> "ChatRequest":
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are the same setting and differ")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is for logprobs: true")
        asked = "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt
        if self.continue_final_message and asked:
            raise ValueError("continue_final_message and add_generation_prompt contradict each other")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def notes(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Common):
    """Texts, or token ids, to be continued."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MOST_CHOICES)]
    )
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    """Tokens of an answer at most; none is the server's limit."""
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    """Tell the probability of every token, and of so many of the likeliest."""
    echo: bool | None = False
    """Begin with the prompt; not together with `logprobs`."""
    best_of: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    """Only as many as `n`."""
    add_special_tokens: bool = True
    """Begin a prompt given as text as the target's tokenizer does."""

    @model_validator(mode="after")
    def _completion_agrees(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of other than n is not served: ask for n answers and choose")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo together with logprobs is not served")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def notes(self) -> int | None:
        return self.logprobs
