"""How bytes travel. Nothing here knows of parameters, units or steps.

backends.py        the one place that chooses the collectives of a process group by its backend
base.py            Collectives (the protocol), StartedWork, SingleRank
coalesced.py       torch's own collectives, many tensors in one call (nccl)
gloo.py            gloo's collectives, as messages between pairs of ranks under tags
custom.py          AllGather, ReduceScatter: collectives and memory of the caller's own
streams.py         lanes: queues of messages, as streams of an accelerator or threads of a backend; InFlight
traffic.py         TrafficCounter: messages that passed while a caller counted
process_groups.py  process groups, held until torch destroys them
"""
