"""The front end: the API of users.

api.py              fully_shard()
module.py           FSDPModule (the mixin of sharded modules), UnshardHandle, resident()
"""
