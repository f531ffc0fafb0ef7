"""What Prometheus reads at `/metrics`."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dspark_train.decoding.stats import Round

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
DRAFTS = tuple(range(17))


class Metrics:
    """Counts of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        kept = {"registry": self.registry, "namespace": "dspark"}
        self.running = Gauge("requests_running", "Requests in the batch", **kept)
        self.waiting = Gauge("requests_waiting", "Requests without a row", **kept)
        self.positions = Gauge("positions", "Tokens that the batch holds", **kept)
        self.finished = Counter("requests", "Requests that ended", ["reason"], **kept)
        self.refused = Counter("requests_refused", "Requests that found the queue full", **kept)
        self.preempted = Counter("preemptions", "Requests that gave way to older ones", **kept)
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens of ended requests", **kept)
        self.tokens = Counter("generated_tokens", "New tokens", **kept)
        self.rounds = Counter("rounds", "Rounds, each request's counted", **kept)
        self.verified = Counter("drafts_verified", "Drafts that entered the target pass", **kept)
        self.accepted = Histogram(
            "drafts_accepted", "Drafts that stood in a round", buckets=DRAFTS, **kept
        )
        first = "Seconds from arrival to the first token"
        self.first = Histogram("time_to_first_token_seconds", first, buckets=SECONDS, **kept)
        between = "Seconds between deliveries of new tokens, a token's share"
        self.between = Histogram("inter_token_seconds", between, buckets=SECONDS, **kept)
        whole = "Seconds from arrival to the end"
        self.whole = Histogram("request_seconds", whole, buckets=SECONDS, **kept)

    def count(self, one: Round) -> None:
        """One round of one request."""
        self.rounds.inc()
        self.verified.inc(one.proposed)
        self.accepted.observe(one.accepted)

    def told(self, tokens: int, seconds: float, first: bool) -> None:
        """So many new tokens, so many seconds after the ones before them (or the arrival)."""
        if not tokens:
            return
        self.tokens.inc(tokens)
        if first:
            self.first.observe(seconds)
        else:
            self.between.observe(seconds / tokens)

    def ended(self, reason: str, seconds: float, prompt_tokens: int) -> None:
        """A request is over."""
        self.finished.labels(reason).inc()
        self.prompt_tokens.inc(prompt_tokens)
        self.whole.observe(seconds)

    def load(self, running: int, waiting: int, positions: int) -> None:
        """What is there at the moment."""
        self.running.set(running)
        self.waiting.set(waiting)
        self.positions.set(positions)

    def text(self) -> bytes:
        """The page that Prometheus scrapes."""
        return generate_latest(self.registry)
