"""The metrics adapter: reads the pods of every LLMService and answers the HPA through custom.metrics.k8s.io.

Inwards to outwards: histogram and pressure decide (pure), scrape and discover read the cluster, collector keeps the
latest round in memory, api answers from it, certs and server make it reachable. `histogram`, `pressure` and `scrape`
are also used by the operator's status columns and by local mode.
"""
