"""What goes in and out of the server, as JSON. These classes are the OpenAPI schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Score = Annotated[float, Field(ge=0, le=1)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StepIn(Strict):
    """One step."""

    action: str = Field(description="exactly what the policy wrote")
    observation: str = Field("", description="what came back")


class TrajectoryIn(Strict):
    """A trajectory, as a line of a trajectories file. Only `task` and `steps` are needed."""

    task: str
    steps: list[StepIn]
    id: str | None = Field(None, description="checked against the text where it is given")
    outcome: float | None = Field(None, ge=0, le=1, description="not used")
    meta: dict[str, Any] | None = Field(None, description="`tools`, JSON-schema functions, are read by chat layouts")


class ScoreRequest(Strict):
    """Trajectories to score."""

    trajectories: list[TrajectoryIn]
    long: Literal["error", "truncate", "windows"] = Field(
        "error",
        description="what becomes of a trajectory that is longer than the model reads at once: an error; the scores of "
        "the steps that fit, and null for the others; or windows over it, as `prm score` reads it",
    )


class Result(BaseModel):
    """The scores of one trajectory."""

    id: str | None = Field(description="derived from task and steps")
    scores: list[Score | None] | None = Field(description="P(good), one a step; null where a step was not read")
    truncated: bool = Field(False, description="some steps were not read")
    error: str | None = Field(None, description="why there are no scores")


class ScoreResponse(BaseModel):
    """Scores in the order of the request."""

    model: str
    version: str = Field(description="the model's fingerprint: what gives the same scores has the same")
    threshold: float = Field(description="scores below it mean that the step is bad")
    results: list[Result]


class Problem(BaseModel):
    """What is wrong with a request."""

    detail: str


class ScoreProblem(Problem):
    """At least one trajectory cannot be scored; the others are."""

    model: str | None = None
    version: str | None = None
    results: list[Result] | None = None


class Health(BaseModel):
    """The server lives, and what it serves."""

    status: Literal["ok"]
    model: str
    version: str
    threshold: float
    max_tokens: int | None
    max_trajectories: int
    max_body_bytes: int


class RewardRequest(BaseModel):
    """OpenRLHF's remote reward protocol."""

    query: list[str] | str = Field(description="prompt and response, as text")
    prompts: list[str] | str | None = Field(None, description="the prompts alone, one for each query")
    labels: Any = Field(None, description="not used")


class RewardResponse(BaseModel):
    """One scalar for each query."""

    rewards: list[float]
    scores: list[float] = Field(description="the same, for dynamic sampling")
    extra_logs: dict[str, Any] = Field(default_factory=dict)


class Message(BaseModel):
    """One message of a chat; other fields (reasoning_content, tool_call_id, name) are kept."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Any = None
    tool_calls: Any = None


def _whole(value: Any) -> Any:
    """An integer as JSON has it: 2.0 is one, true and "2" are none."""
    if isinstance(value, bool | str):
        raise ValueError("expected an integer")
    return int(value) if isinstance(value, float) and value.is_integer() else value


TokenId = Annotated[int, Field(ge=0), BeforeValidator(_whole)]


class PoolingOptions(BaseModel):
    model: str | None = None
    encoding_format: Literal["float"] = "float"
    use_activation: bool | None = Field(None, description="false gives logits, not scores")


class PoolingInput(PoolingOptions):
    """vLLM's pooling request for texts or token ids."""

    input: str | list[str] | list[TokenId] | list[list[TokenId]]


class PoolingChat(PoolingOptions):
    """vLLM's pooling request for a chat, read as a trajectory; one row of data a step."""

    messages: list[Message]


class PoolingData(BaseModel):
    index: int
    object: Literal["pooling"] = "pooling"
    data: list[list[float]] = Field(description="[score] of each token; of each step for a chat")


class Usage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class PoolingResponse(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PoolingData]
    usage: Usage


class Reloaded(BaseModel):
    """The model that is served now."""

    model: str
    version: str
    changed: bool
