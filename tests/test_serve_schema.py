"""The server keeps to its own OpenAPI schema, whatever is sent: generated requests, each answer checked against it."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from prm.serve.app import app
from prm.serve.config import ServeConfig
from tests.test_serve import make

schemathesis = pytest.importorskip("schemathesis")


@pytest.fixture(scope="module")
def operations():
    own = app(make(max_tokens=256), ServeConfig())
    schema = schemathesis.openapi.from_asgi("/openapi.json", own)
    return {found.ok().path: found.ok() for found in schema.get_all_operations()}


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
@pytest.mark.parametrize("path", ["/score", "/get_reward", "/pooling", "/healthz", "/metrics", "/reload"])
def test_every_answer_is_in_the_schema(operations, path, mode):
    if mode == "NEGATIVE" and path in ("/healthz", "/metrics", "/reload"):
        pytest.skip("takes nothing that could be wrong")
    strategy = operations[path].as_strategy(generation_mode=getattr(schemathesis.GenerationMode, mode))

    @settings(
        max_examples=20,
        derandomize=True,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def check(case):
        case.call_and_validate()

    check()
