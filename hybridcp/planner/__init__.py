"""Planning without hardware: which Ulysses × ring layout, how fast, and why not another.

    result = plan(heads=32, ranks=256)
    print(result)
    result.best.layout.save("layout.yaml")

Never imports torch.
"""

from hybridcp.planner.cluster import Cluster, load_cluster, preset_names
from hybridcp.planner.planning import plan
from hybridcp.planner.problem import Problem
from hybridcp.planner.result import PlanResult
from hybridcp.planner.search import Candidate, Rejected

__all__ = [
    "Candidate",
    "Cluster",
    "PlanResult",
    "Problem",
    "Rejected",
    "load_cluster",
    "plan",
    "preset_names",
]
