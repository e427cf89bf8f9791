"""Counters of a server, in Prometheus' text exposition format 0.0.4."""

from __future__ import annotations

import threading
from collections import defaultdict

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKENS = (64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0)
HELP = {
    "prm_requests_total": ("counter", "Requests answered, by route and status."),
    "prm_request_seconds": ("histogram", "Time from the request's body to the answer, by route."),
    "prm_steps_total": ("counter", "Steps scored."),
    "prm_read_tokens_total": ("counter", "Tokens that went through the model."),
    "prm_asked_tokens_total": ("counter", "Tokens of the sequences asked for; shared prefixes count each time."),
    "prm_batch_tokens": ("histogram", "Tokens of the sequences in one pass of the model."),
    "prm_reloads_total": ("counter", "Reloads of the model, by result."),
    "prm_cancelled_total": ("counter", "Requests dropped because the client had gone or the time was up, by reason."),
    "prm_queue_tokens": ("gauge", "Tokens waiting."),
    "prm_requests_in_flight": ("gauge", "Requests being answered."),
    "prm_model_info": ("gauge", "1; the labels name the model."),
}
BUCKETS = {"prm_request_seconds": SECONDS, "prm_batch_tokens": TOKENS}

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Thread-safe counters, gauges and histograms under the names of `HELP`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        self._counts: dict[str, dict[Labels, list[float]]] = defaultdict(dict)

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        with self._lock:
            self._values[name][tuple(sorted(labels.items()))] += value

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge; other label values of it are dropped."""
        with self._lock:
            self._values[name] = defaultdict(float, {tuple(sorted(labels.items())): value})

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Put a value into a histogram."""
        key, bounds = tuple(sorted(labels.items())), BUCKETS[name]
        with self._lock:
            row = self._counts[name].setdefault(key, [0.0] * (len(bounds) + 2))
            for i, bound in enumerate(bounds):
                row[i] += value <= bound
            row[-2] += 1
            row[-1] += value

    def value(self, name: str, **labels: str) -> float:
        """A counter or gauge as it is now."""
        with self._lock:
            return self._values[name][tuple(sorted(labels.items()))]

    def exposition(self) -> str:
        """All of it as text."""
        lines = []
        with self._lock:
            for name, (kind, help_text) in HELP.items():
                lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
                lines += [f"{name}{_labels(key)} {value:g}" for key, value in sorted(self._values[name].items())]
                for key, row in sorted(self._counts[name].items()):
                    for bound, count in zip((*BUCKETS[name], float("inf")), row, strict=False):
                        label = "+Inf" if bound == float("inf") else f"{bound:g}"
                        lines.append(f"{name}_bucket{_labels((*key, ('le', label)))} {count:g}")
                    lines += [f"{name}_count{_labels(key)} {row[-2]:g}", f"{name}_sum{_labels(key)} {row[-1]:.10g}"]
        return "\n".join(lines) + "\n"


def _labels(key: Labels) -> str:
    if not key:
        return ""
    escaped = ((k, v.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")) for k, v in key)
    return "{" + ",".join(f'{k}="{v}"' for k, v in escaped) + "}"
