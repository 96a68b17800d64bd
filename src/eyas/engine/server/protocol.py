"""What requests may hold: OpenAI's fields as far as they are served, and what SGLang and vLLM add to them.

An unknown field is an error, not a silence: a misspelt `temprature` would be answered as if it were not there. What
OpenAI has and this server has not (tools, answers in a schema, images, audio) is a field all the same, with the values
that ask for nothing: any other is refused as unsupported. Null asks for nothing anywhere: clients send it for whatever
they leave out.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

MOST_CHOICES, MOST_STOPS, MOST_TOP = 16, 16, 20
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
StopText = Annotated[str, Field(min_length=1, max_length=200)]
TokenText = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[int, Field(ge=0)]


TEXT, TEXTS, IDS, LISTS = "<text>", "<texts>", "<ids>", "<lists>"
"""Tags of the forms that a field may have; errors.py takes them out of the places it names."""


def form(value: Any) -> str:
    """Which form is meant: mistakes are told of that one alone."""
    if not isinstance(value, list):
        return TEXT
    first = value[0] if value else ""
    return LISTS if isinstance(first, list) else TEXTS if isinstance(first, str | dict) else IDS


def form_of_texts(value: Any) -> str:
    return TEXTS if isinstance(value, list) else TEXT


Stop = Annotated[
    Annotated[StopText, Tag(TEXT)] | Annotated[list[StopText], Field(max_length=MOST_STOPS), Tag(TEXTS)],
    Discriminator(form_of_texts),
]
Ids = Annotated[list[TokenId], Field(min_length=1)]
Prompt = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[Ids, Tag(IDS)]
    | Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES), Tag(TEXTS)]
    | Annotated[list[Ids], Field(min_length=1, max_length=MOST_CHOICES), Tag(LISTS)],
    Discriminator(form),
]


def at_odds(param: str, words: str, code: str = "invalid_value") -> PydanticCustomError:
    """What is wrong between fields; `param` is the one to change."""
    return PydanticCustomError("at_odds", "{words}", {"words": words, "param": param, "code": code})  # pyrefly: ignore


class Body(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )

    @model_validator(mode="before")
    @classmethod
    def _null_asks_for_nothing(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None or name in cls.model_fields}


class StreamOptions(Body):
    """What a stream tells beside the text."""

    include_usage: bool | None = False
    """One more event at the end, with the usage and no choices."""
    continuous_usage_stats: bool | None = False
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
    stop: Stop | None = None
    """Strings at which the answer ends; they are not part of it."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_STOPS)] | None = None
    """Tokens at which the answer ends, beside the target's own."""
    ignore_eos: bool | None = False
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
    return_token_ids: bool | None = False
    """Add `token_ids` to choices (and to the events of a stream), and `prompt_token_ids`."""
    mark_accepted: bool | None = False
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
            raise at_odds("stream_options", "stream_options is for stream: true")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def choices(self) -> int:
        return self.n or 1


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


Nothing = Annotated[list[Any], Field(max_length=0)]


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Annotated[str, Tag(TEXT)] | Annotated[list[TextPart], Tag(TEXTS)], Discriminator(form_of_texts)]
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
    add_generation_prompt: bool | None = True
    """Begin the answer's turn after the last message."""
    continue_final_message: bool | None = False
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
    reasoning_effort: Literal["none"] | None = None
    """Unsupported: none; a template that knows of thinking is told by `chat_template_kwargs`."""

    @model_validator(mode="after")
    def _chat_agrees(self) -> "ChatRequest":
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise at_odds("max_tokens", "max_tokens and max_completion_tokens are the same setting and differ")
        if self.top_logprobs is not None and not self.logprobs:
            raise at_odds("top_logprobs", "top_logprobs is for logprobs: true")
        asked = "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt
        if self.continue_final_message and asked:
            words = "continue_final_message and add_generation_prompt contradict each other"
            raise at_odds("continue_final_message", words)
        return self

    @property
    def limit(self) -> int | None:
        """Tokens of an answer that are asked for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def limit_field(self) -> str:
        return "max_completion_tokens" if self.max_completion_tokens else "max_tokens"

    @property
    def usual(self) -> int | None:
        """Tokens of an answer where nothing is asked for; none: as many as there may be."""
        return None

    @property
    def prompts(self) -> int:
        return 1

    @property
    def notes(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Common):
    """Texts, or token ids, to be continued."""

    prompt: Prompt
    """A text, token ids, or up to 16 of either."""
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    """Tokens of an answer at most; none is the server's limit. 0 only with `echo`: the prompt, and nothing new."""
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    """Tell the probability of every token, and of so many of the likeliest."""
    echo: bool | None = False
    """Begin with the prompt; not together with `logprobs`."""
    best_of: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    """Only as many as `n`."""
    add_special_tokens: bool | None = True
    """Begin a prompt given as text as the target's tokenizer does."""

    suffix: None = None
    """Unsupported: none."""

    @model_validator(mode="after")
    def _completion_agrees(self) -> "CompletionRequest":
        if self.best_of not in (None, self.choices):
            words = "best_of other than n is not supported by this server: ask for n answers and choose"
            raise at_odds("best_of", words, "unsupported_parameter")
        if self.echo and self.logprobs is not None:
            words = "echo together with logprobs is not supported by this server"
            raise at_odds("echo", words, "unsupported_parameter")
        if self.max_tokens == 0 and not self.echo:
            raise at_odds("max_tokens", "max_tokens: 0 asks for nothing, unless echo: true asks for the prompt")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens if "max_tokens" in self.model_fields_set else None

    @property
    def limit_field(self) -> str:
        return "max_tokens"

    @property
    def usual(self) -> int | None:
        return self.max_tokens

    @property
    def prompts(self) -> int:
        alone = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return 1 if alone else len(self.prompt)

    @property
    def notes(self) -> int | None:
        return self.logprobs
