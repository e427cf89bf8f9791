"""Tests run side by side on few cores: one thread each, and no hub."""

import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")

# Files of many seconds go first, so that no core is left with one of them at the end.
LONG = (
    "test_export", "test_model", "test_annotate_pages", "test_annotate_browser", "test_remote", "test_serve",
    "test_run", "test_ppo", "test_distill", "test_published", "test_judge_money", "test_judge_batch",
    "test_notebooks", "test_serve_schema", "test_montecarlo", "test_foreign", "test_sft", "test_roles",
    "test_shared", "test_parallel",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
