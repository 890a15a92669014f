"""Local mode: an LLMService on this machine, without a cluster, with processes in place of pods.

It is a second implementation of the operator's `Cluster` seam. What a cluster's own machinery does there, a small part
here does in its place:

    store       the API server's memory: objects, generations, owners
    deployment  the Deployment controller: replicas, rolling updates
    autoscaler  the HPA controller
    machine     the scheduler: which pod fits onto this machine, which GPUs are its own
    kubelet     the kubelet: containers as processes, probes, restarts with back-off, termination
    front       the Service: a TCP front door that leads to ready pods only
    cluster     all of it behind the seam

Nothing here decides what a service looks like: the pod, its configuration file, its probes and its conditions come
from the operator's code.
"""
