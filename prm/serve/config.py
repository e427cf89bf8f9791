"""The server's options."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

from prm.batching import AGGREGATES
from prm.config import option
from prm.errors import UsageError
from prm.remote import KEY_VARIABLE


@dataclass(frozen=True)
class ServeConfig:
    """The API key comes from the environment variable PRM_API_KEY, so that no process list or file shows it."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is the whole network")
    port: int = option(8000, "port; 0 takes a free one")
    kind: str = option("auto", "how the checkpoint reads steps: auto, prm, or whose it is (see docs/serve.md)")
    prompt: str | None = option(None, "kind yes-no: the question put after the steps")
    base: str | None = option(None, "where an adapter's base is, if it moved")
    dtype: str | None = option(None, "of the weights (default: as saved)", choices=("float32", "bfloat16"))
    max_tokens: int | None = option(None, "read at most so many tokens at once (default: what the model reads)")
    batch_tokens: int = option(8192, "the most tokens in one pass of the model")
    queue_tokens: int = option(262144, "answer 503 when more than so many tokens wait")
    max_requests: int = option(256, "answer 503 when more requests are being answered")
    max_trajectories: int = option(256, "the most trajectories in a request")
    max_body_bytes: int = option(8388608, "answer 413 to a larger body")
    timeout: float = option(120.0, "seconds after which a request is given up, with 503")
    split: str = option("blank-line", "how OpenRLHF's texts become steps", choices=("blank-line", "line"))
    aggregate: str = option("min", "how step scores become its scalar", choices=AGGREGATES)

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            low = 0 if f.name == "port" else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < low:
                raise UsageError(f"{f.name} must be at least {low}, got {value}")
        if self.port > 65535:
            raise UsageError(f"port must be at most 65535, got {self.port}")
        if not self.timeout > 0:
            raise UsageError(f"timeout must be > 0, got {self.timeout}")

    def key(self) -> str | None:
        """The API key, None where none is asked for. Raises UsageError where no client could send it."""
        key = os.environ.get(KEY_VARIABLE) or None
        if key and not (key.isascii() and key.isprintable()):
            raise UsageError(f"{KEY_VARIABLE} must be printable ASCII, as it travels in a header")
        return key
