"""How parameters are cut: integers, meshes and placements. No message is sent here, and no time passes.

mesh.py            ShardAxis, ReplicateAxis: the axes of a mesh that parameters are sharded and replicated over
layout.py          integers only: Extent, Bucket, GroupLayout, padding, alignment
param_sharding.py  ParamSharding: how one parameter is cut, and what its DTensors say (tensor parallelism, hybrid meshes)
module_tree.py     DFS over modules: which module owns which parameter and buffer
"""
