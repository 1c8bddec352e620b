"""Runs in an environment of its own: hit rates of independent simulators on a trace in Mooncake's format, as JSON.

python oracle.py TRACE BLOCKS [BLOCKS ...]
"""

import json
import sys
from pathlib import Path


def main(path, capacities):
    """Token hit rates of the second half of the requests, and hit rates over single blocks."""
    from kvcache_sim.plan import build_execution_plan
    from kvcache_sim.policies import simulate_policy
    from kvcache_sim.trace import parse_trace_file

    plan = build_execution_plan(parse_trace_file(Path(path), block_size=512), warmup_fraction=0.5)
    found = {
        f"kvcache-simulator {policy} {blocks}": simulate_policy(plan, policy, blocks).hitRate
        for policy in ("lru", "optimal") for blocks in capacities
    }
    return {"rates": found, "flat": list(flat(path, capacities))}


def flat(path, capacities):
    """libCacheSim over single blocks, which knows no tree: (policy, blocks, hit rate)."""
    import libcachesim

    blocks = [x for line in Path(path).read_text().splitlines() for x in json.loads(line)["hash_ids"]]
    for name, kind in (("lru", libcachesim.LRU), ("fifo", libcachesim.FIFO), ("arc", libcachesim.ARC)):
        for size in capacities:
            cache = kind(size)
            request = libcachesim.Request()
            request.obj_size = 1
            hits = 0
            for x in blocks:
                request.obj_id = x
                hits += cache.get(request)
            yield name, size, hits / len(blocks)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], [int(x) for x in sys.argv[2:]])))
