"""A core over a fake model, and how tests step it."""

from time import perf_counter

from paceline_server.config import SchedulingConfig
from paceline_server.engine.core import EngineCore
from paceline_server.engine.interface import FinishReason, GenerationRequest
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.engine.testing import FakeRunner, model_info


def make_core(*, batch=4, budget=8, prefix_caching=True, policy="slo", clock=perf_counter, bypass=0.5, **info):
    model = model_info(**info)
    runner = FakeRunner(model)
    limits = SchedulerLimits(batch, budget, bypass)
    scheduling = SchedulingConfig(policy=policy)
    return EngineCore(runner, model, limits, scheduling, prefix_caching=prefix_caching, clock=clock), runner


def request(name, prompt, max_tokens=5, **options):
    return GenerationRequest(name, prompt, max_tokens, ignore_eos=options.pop("ignore_eos", True), **options)


def step(core):
    """Run a step; returns its outputs, integrity checked."""
    outputs = core.step()
    core.scheduler.check_integrity()
    return outputs


class Answers:
    """What a core has told so far.

    Attributes:
        tokens: by request.
        reasons: of those that have ended, in the order of their ends.
    """

    def __init__(self):
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}

    def take(self, outputs):
        """Take in the outputs of a step; none may come after a request's end."""
        for output in outputs:
            assert output.request_id not in self.reasons, "output after the end"
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish is not None:
                self.reasons[output.request_id] = output.finish


def run(core, limit=10_000):
    """Step until nothing is left; returns tokens and finish reasons by request, integrity checked after every step."""
    answers = Answers()
    for _ in range(limit):
        if not core.has_work:
            return answers.tokens, answers.reasons
        answers.take(step(core))
    raise AssertionError("no progress")


class Clock:
    """Time that goes on only when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def started(core):
    """Names of the requests that run."""
    return {sequence.request_id for sequence in core.scheduler.running}
