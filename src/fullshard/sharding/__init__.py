"""Plans of how parameters are sharded: integers, meshes and placements. No tensor data is communicated here.

mesh.py            ShardAxis, ReplicateAxis: the axes of a mesh that parameters are sharded and replicated over
layout.py          integers only: Extent, Bucket, GroupLayout, padding, alignment
param_sharding.py  ParamSharding: dim, shapes, mesh and placements of one parameter (tensor parallelism, hybrid meshes)
module_tree.py     depth-first walk over modules: the parameters and buffers that a unit manages
"""
