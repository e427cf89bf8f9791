"""Labels from a strong model that judges the steps of trajectories, over any OpenAI-compatible endpoint."""

from labeling.judge.run import JudgeConfig, Judged, judge, run

__all__ = ["JudgeConfig", "Judged", "judge", "run"]
