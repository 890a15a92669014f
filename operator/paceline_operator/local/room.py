"""How many replicas autoscaling may make on one machine: a cluster gets nodes for them, here they share the cores.

A server that requests no CPU computes with all cores, or with `spec.engine.threads` of them. A second one on the same
cores makes both slower, which to an autoscaler looks like a reason for a third. Pure; called by `plane` and `up`.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline_operator.cluster import Key, Manifest
from paceline_operator.desired import render
from paceline_operator.local.machine import GPU, Machine, requests_of
from paceline_operator.local.manifest import IMAGE
from paceline_operator.spec import LLMService, LLMServiceSpec, parse_spec


@dataclass(frozen=True, slots=True)
class Room:
    """Replicas that the machine has room for, at least one, and what bounds them, in words."""

    replicas: int
    reason: str


def room(spec: LLMServiceSpec, machine: Machine) -> Room | None:
    """The room for replicas of a service; None where nothing bounds them."""
    template = render(LLMService(Key("default", "room"), "", 0, spec), IMAGE).deployment["spec"]["template"]
    requests = requests_of(template)
    bounds = []
    if gpus := requests.get(GPU):
        bounds.append(Room(int(len(machine.gpus) // gpus), f"each holds {float(gpus):g} of this machine's GPUs"))
    if cpus := requests.get("cpu"):
        bounds.append(
            Room(int(machine.cpus // cpus), f"each requests {float(cpus):g} of this machine's {machine.cpus} cores")
        )
    elif not gpus:
        threads = min(spec.engine.threads or machine.cpus, machine.cpus)
        used = f"each computes with {threads} of this machine's {machine.cpus} cores (spec.engine.threads)"
        bounds.append(Room(int(machine.cpus // threads), used))
    if memory := requests.get("memory"):
        bounds.append(Room(int(machine.memory // memory), "each requests memory that this machine has no more of"))
    least = min(bounds, key=lambda bound: bound.replicas, default=None)
    return None if least is None else Room(max(1, least.replicas), least.reason)


def bounded(hpa: Manifest, most: Room | None) -> Manifest:
    """The HPA with no more replicas at most than there is room for, or than it asks for at least."""
    if most is None:
        return hpa
    spec = hpa["spec"]
    limit = max(most.replicas, spec.get("minReplicas", 1))
    return {**hpa, "spec": {**spec, "maxReplicas": min(spec["maxReplicas"], limit)}}


def note(service: Manifest, machine: Machine) -> str | None:
    """What to tell a user whose service would be scaled further in a cluster."""
    spec = parse_spec(service["spec"])
    most = room(spec, machine)
    if spec.autoscaling is None or most is None:
        return None
    limit = max(most.replicas, spec.autoscaling.min_replicas)
    if limit >= spec.autoscaling.max_replicas:
        return None
    return f"spec.autoscaling.maxReplicas: {limit} on this machine: {most.reason}"
