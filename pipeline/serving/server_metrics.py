"""Metrics of the HTTP server in the format of Prometheus, for GET /metrics."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

ROUTES = ("/predict", "/tasks", "/health", "/metrics", "/openapi.json", "/")
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
# Limits of the histogram's buckets in seconds. The largest is the deadline of an answer.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class ServerMetrics:
    """Counters and gauges of one HTTP server.

    Args:
        predictions: Returns the number of predictions that run or wait.
        held: Returns the total bytes of all request bodies in memory.
        replicas: Returns the number of replicas that can answer.
    """

    def __init__(
        self,
        predictions: Callable[[], int],
        held: Callable[[], int],
        replicas: Callable[[], int],
    ):
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "accrete_requests",
            "Answered requests",
            ["route", "status"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "accrete_request_duration_seconds",
            "Time from the head of a request to its answer",
            ["route"],
            buckets=BUCKETS,
            registry=self.registry,
        )
        gauges = {
            "accrete_predictions_in_progress": ("Predictions that run or wait", predictions),
            "accrete_request_body_bytes": ("Bytes of all request bodies in memory", held),
            "accrete_replicas": ("Replicas of the model that can answer", replicas),
        }
        for name, (text, function) in gauges.items():
            Gauge(name, text, registry=self.registry).set_function(function)

    def count(self, path: str, status: int, seconds: float) -> None:
        """Count an answered request.

        Args:
            path: Path of the request; unknown paths share the label `other`.
            status: HTTP status of the answer.
            seconds: Time from the head of the request to its answer.
        """
        route = path if path in ROUTES else "other"
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)
