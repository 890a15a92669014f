"""A real HPA scales on what the adapter says: up, down again, and not on what is unknown."""

from __future__ import annotations

from collections.abc import Callable

from adapters import Adapter, Service, eventually

AUTOSCALING = {
    "maxReplicas": 4,
    "targetQueueDepth": 4,
    "ttftObjectiveSeconds": 1,
    "scaleDownStabilizationSeconds": 0,
}


def test_a_real_hpa_scales_up_on_queue_depth_and_down_again(
    adapter: Adapter, make_service: Callable[..., Service]
) -> None:
    service = make_service(autoscaling=AUTOSCALING)
    service.servers[0].waiting, service.servers[0].running = 2, 4
    service.autoscale()
    eventually(lambda: service.wanted() == 2)
    assert "6/4 (avg)" in service.hpa()
    service.add_pod()
    service.servers[0].waiting = service.servers[0].running = 0
    eventually(lambda: service.wanted() == 1)
    assert "0/4 (avg)" in service.hpa()


def test_a_real_hpa_scales_up_on_slow_first_tokens(adapter: Adapter, make_service: Callable[..., Service]) -> None:
    service = make_service(autoscaling=AUTOSCALING)
    (server,) = service.servers
    server.running = 1
    eventually(lambda: adapter.metric(service.namespace, "demo", "queue_depth") == "1")  # the pod has been seen
    server.first_tokens = [4.0] * 10
    service.autoscale()
    eventually(lambda: service.wanted() == 2)
    assert adapter.metric(service.namespace, "demo", "ttft_pressure") == "2"


def test_a_pod_that_stops_answering_does_not_take_replicas_away(
    adapter: Adapter, make_service: Callable[..., Service]
) -> None:
    """Two requests are half a replica's worth: only that the rest is unknown keeps the second replica."""
    service = make_service(autoscaling=AUTOSCALING, replicas=2)
    service.add_pod().running = 2
    eventually(lambda: adapter.metric(service.namespace, "demo", "queue_depth") == "2")
    service.servers[1].broken = True
    eventually(lambda: adapter.metric(service.namespace, "demo", "ttft_pressure") == "1")
    service.autoscale()
    eventually(lambda: "1/4 (avg), 1/1" in service.hpa())
    assert service.wanted() == 2
    service.servers[1].broken = False
    eventually(lambda: service.wanted() == 1)
