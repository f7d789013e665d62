"""Transport: collectives, streams and process groups. Nothing here depends on parameters, units or steps.

backends.py        the choice of collectives for a process group, by its backend
base.py            Collectives (the protocol), StartedWork, SingleRank
coalesced.py       torch.distributed's collectives, several tensors per call (nccl)
gloo.py            gloo on the CPU: point-to-point messages under tags
streams.py         streams on which collectives are sent, logged and waited for; InFlight, the queue of those in flight
traffic.py         TrafficCounter: counts collectives
"""
