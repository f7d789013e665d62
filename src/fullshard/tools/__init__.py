"""Tools around training.

install.py   install(): replace torch's FSDP2 by fullshard
counting.py  counting(), stats(): collectives of a block, and all-gathers so far
lint.py      lint(): remarks on a sharded model
verify.py    verify(): compare sharded and unsharded training
loading.py   load functions that a command line names; errors in one line
"""
